"""Several real processes for a test: each runs one importable function as one rank of a group, of Gloo by default.

    results = workers.run(3, "tests.behaviour.decoupled_cases:reference", timeout_s=60)

The function is called as ``function(rank, world_size, *arguments)`` after ``init_process_group``; what it returns comes
back as JSON, by rank. A rank that raises fails the test with its traceback, and a rank that outlasts the time limit
fails it with everybody's output. The limit counts from when every rank has imported what it needs, and a busy machine
stretches it (``limits``). Ranks are forked from a process that has imported torch and Headway (``rank_server``).
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests import limits, rank_server

ROOT = Path(__file__).parents[1]
PATHS = (ROOT, ROOT / "src", *sorted(ROOT.glob("contrib/*/tests")))
START_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Worker:
    """How one rank ended: its exit status, what it printed, and what its function returned."""

    rank: int
    status: int
    output: str
    result: Any


def run(
    world_size: int,
    function: str,
    *arguments: Any,
    timeout_s: float = 60,
    group_timeout_s: float = 30,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``module:function`` on ``world_size`` ranks; return what each returned. Fails where one did not end well."""
    workers = launch(
        world_size, function, *arguments, timeout_s=timeout_s, group_timeout_s=group_timeout_s, backend=backend
    )  # fmt: skip
    failed = [worker for worker in workers if worker.status != 0]
    if failed:
        raise AssertionError(
            "\n".join(f"rank {w.rank} of {function} ended with {w.status}:\n{w.output}" for w in failed)
        )
    return [worker.result for worker in workers]


def launch(
    world_size: int,
    function: str,
    *arguments: Any,
    timeout_s: float = 60,
    group_timeout_s: float = 30,
    backend: str = "gloo",
    lost: Sequence[int] = (),
    bare: bool = False,
    finalise: bool = False,
) -> list[Worker]:
    """As ``run``, but for tests in which ranks are meant to die: return how each ended.

    Nobody waits for the ranks ``lost``: they are killed when the others have ended. With the backend "" the function
    forms the process group by itself. ``bare`` ranks have not imported Headway. With ``finalise`` a rank that ends well
    takes its interpreter apart, as Python does by itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        group_limit_s = limits.stretched(group_timeout_s)
        started = [
            _start(
                Path(folder), rank, world_size, function, arguments, group_limit_s, backend,
                bare=bare, finalise=finalise,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        _await_start(Path(folder), started)
        limit = limits.Limit(timeout_s, lambda: [process.pid for process in started])
        overdue = False
        awaited = [process for rank, process in enumerate(started) if rank not in lost]
        while any(process.poll() is None for process in awaited) and not (overdue := limit.over()):
            time.sleep(0.005)
        for process in started:
            process.kill()
            process.wait()
        workers = [_ended(Path(folder), rank, process) for rank, process in enumerate(started)]
    if overdue:
        raise AssertionError(
            f"{function} took longer than {timeout_s:g} s:\n"
            + "\n".join(f"rank {w.rank} ({w.status}):\n{w.output}" for w in workers)
        )
    return workers


def _start(
    folder: Path,
    rank: int,
    world_size: int,
    function: str,
    arguments: tuple[Any, ...],
    group_timeout_s: float,
    backend: str,
    *,
    bare: bool,
    finalise: bool,
) -> rank_server.Forked:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    job = {"rank": rank, "world_size": world_size, "function": function, "arguments": arguments,
           "folder": str(folder), "group_timeout_s": group_timeout_s, "backend": backend,
           "finalise": finalise}  # fmt: skip
    return rank_server.start(rank, json.dumps(job), folder / f"output-{rank}", environment, bare=bare)


def _await_start(folder: Path, started: list[rank_server.Forked]) -> None:
    limit = limits.Limit(START_LIMIT_S, lambda: [process.pid for process in started])
    while not limit.over() and all(process.poll() is None for process in started):
        if all((folder / f"started-{rank}").exists() for rank in range(len(started))):
            return
        time.sleep(0.005)


def _ended(folder: Path, rank: int, process: rank_server.Forked) -> Worker:
    result = folder / f"result-{rank}"
    return Worker(
        rank=rank,
        status=process.wait(),
        output=(folder / f"output-{rank}").read_text(errors="replace")[-8000:],
        result=json.loads(result.read_text()) if result.exists() else None,
    )


def work(described: str) -> None:
    """Be one rank, as ``launch`` has described it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    job: dict[str, Any] = json.loads(described)
    torch.set_num_threads(1)
    folder, rank, world_size = Path(job["folder"]), job["rank"], job["world_size"]
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    store = FileStore(str(folder / "store"), world_size)
    (folder / f"started-{rank}").touch()
    meet(store, rank, world_size, limits.stretched(START_LIMIT_S))
    if job["backend"]:
        dist.init_process_group(
            job["backend"], store=store, rank=rank, world_size=world_size,
            timeout=timedelta(seconds=job["group_timeout_s"]),
        )  # fmt: skip
    result = function(rank, world_size, *job["arguments"])
    (folder / f"result-{rank}").write_text(json.dumps(result))
    if dist.is_initialized():
        time.sleep(0.1)  # Gloo's threads may hang where they still hold a tensor
        dist.destroy_process_group()
    if not job["finalise"]:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def meet(store: Any, rank: int, world_size: int, limit_s: float) -> None:
    """Wait until every rank is there: a group with a short timeout must not be formed before."""
    store.set(f"started-{rank}", "")
    store.wait([f"started-{each}" for each in range(world_size)], timedelta(seconds=limit_s))
