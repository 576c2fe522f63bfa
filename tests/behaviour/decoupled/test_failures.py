"""A rank that fails in the middle of a step: its peers say who it was, nobody hangs, and the job can be restarted."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import commands, workers
from tests.behaviour.decoupled import failure_cases, restart_script
from tests.behaviour.decoupled.job import DDP, EXACT, GRADIENTS, PARAMETERS, mlp, rows
from torch import nn

MODES = (GRADIENTS, PARAMETERS)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(420)]


def _run(command: list[str], timeout_s: float) -> None:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(workers.ROOT), str(workers.ROOT / "src")]),
        # Else torchrun's second attempt may find the addresses of its first (pytorch issue 135712), in stock DDP too.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    done = commands.run(command, timeout_s, environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


CommandOutcome = Callable[[str], tuple[Path, dict[str, int | None]]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> CommandOutcome:
    """Runs all jobs of a kind at the first one's test."""

    @cache
    def of_kind(which: str) -> tuple[Path, dict[str, int | None]]:
        folder = tmp_path_factory.mktemp("failures")
        _run([sys.executable, "-m", failure_cases.__name__, str(folder), which], timeout_s=400)
        return folder, json.loads((folder / "statuses.json").read_text())

    return of_kind


@pytest.mark.parametrize(
    ("which", "job"),
    [
        pytest.param(which, job, id=failure_cases.name_of(*job), marks=marks)
        for which, marks in (("default", []), ("exhaustive", [pytest.mark.exhaustive]))
        for job in failure_cases.jobs(exhaustive=which == "exhaustive")
    ],
)
def test_every_peer_names_the_rank_that_failed(
    ended: CommandOutcome, which: str, job: tuple[str, str, str]
) -> None:
    folder, statuses = ended(which)
    name = failure_cases.name_of(*job)
    for rank in range(failure_cases.WORLD_SIZE):
        if rank == failure_cases.CULPRIT:
            continue
        output = (folder / f"{name}-{rank}.txt").read_text()[-6000:]
        assert statuses[f"{name}-{rank}"] == 0, f"rank {rank} hung or died:\n{output}"
        found: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
        named = re.search(rf"\brank {failure_cases.CULPRIT}\b", found["message"])
        assert named, f"rank {rank}: {found['message']}"
        handed_out = [what for what, raised in found["again"].items() if raised != "CommunicationError"]
        assert not handed_out, f"rank {rank} was not stopped at: {found['again']}"
        assert not found["late"], f"rank {rank} noticed it late"


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    script = Path(restart_script.__file__)
    _run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
         "--monitor-interval", "0.1", str(script), str(tmp_path), DDP, *MODES],
        timeout_s=200,
    )  # fmt: skip
    assert (tmp_path / "killed").exists()
    assert (tmp_path / "resumed-0").read_text() == (tmp_path / "resumed-1").read_text() == "4"
    alone = mlp()
    optimizer = restart_script.make_optimizer(alone)
    for step in range(restart_script.STEPS):
        optimizer.zero_grad()
        x, y = rows(restart_script.ROWS, step)
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
    first, second = (torch.load(tmp_path / f"ended-{rank}.pt") for rank in range(2))
    for ours, others in zip(first, second, strict=True):
        for name, expected in alone.state_dict().items():
            assert torch.equal(ours[name], others[name])
            torch.testing.assert_close(ours[name], expected, rtol=EXACT, atol=EXACT)
