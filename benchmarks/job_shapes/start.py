"""On one lab host: start a shape as its author would on a node, with Headway's commands before it.

start.py SHAPE STEPS [headway arguments … --]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "strangers"
_OF_RANKS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)  # fmt: skip


def main(name: str, steps: str, before: Sequence[str]) -> None:
    from job_shapes.catalogue import SHAPES

    shape = next(each for each in SHAPES if each.name == name)
    environment = dict(os.environ)
    place = {
        "node": environment["RANK"], "master": environment["MASTER_ADDR"], "port": environment["MASTER_PORT"],
    }  # fmt: skip
    for variable in _OF_RANKS:
        environment.pop(variable, None)
    environment |= {key: value.format(**place) for key, value in shape.variables.items()}
    launcher = [sys.executable]
    if shape.launcher == "torchrun":
        launcher += [
            "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", place["node"],
            "--master-addr", place["master"], "--master-port", place["port"], "--rdzv-id", "job",
        ]  # fmt: skip
    arguments = [each.format(**place) for each in shape.arguments]
    command = [*before, *launcher, str(SCRIPTS / shape.script), *arguments, "--steps", steps]
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
