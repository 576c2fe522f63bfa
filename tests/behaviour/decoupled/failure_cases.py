"""Jobs in which the last rank fails in the middle of a step, and what its peers find.

    python -m tests.behaviour.decoupled.failure_cases FOLDER default|exhaustive

Several jobs run at a time, for they mostly wait; their ranks are forked from this process, which has imported what
they need. What a rank finds is written to FOLDER as ``JOB-RANK.json``, and what it prints to ``JOB-RANK.txt``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import limits, workers
from tests.behaviour.decoupled.job import GRADIENTS, PARAMETERS, mlp, rows, sgd, wrap
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

WORLD_SIZE = 3
CULPRIT = 2
FAILS_AT, STEPS = 3, 8
GROUP_TIMEOUT_S = 5.0
MEETING_TIMEOUT_S = 60.0
NOTICED_S = 20.0  # four timeouts
LIMIT_S = 45.0  # from the meeting on: several timeouts; whoever has not ended by then hangs
JOBS_AT_A_TIME = 4


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _asleep() -> None:
    time.sleep(limits.stretched(100 * LIMIT_S))


def _raises() -> None:
    raise KeyError("a fault of the script")


FAILURES: dict[str, Callable[[], None]] = {
    "killed": _killed, "stopped": _stopped, "asleep": _asleep, "raises": _raises
}  # fmt: skip
BY_DEFAULT = {
    PARAMETERS: (("killed", "backward"), ("stopped", "backward")),
    GRADIENTS: (("killed", "after step"), ("asleep", "forward")),
}
MOMENTS = ("forward", "backward", "between backward and step", "after step")


def jobs(*, exhaustive: bool) -> list[tuple[str, str, str]]:
    """In both modes every failure in the middle of backward, the worst moment, and one failure at every moment.

    By default a failure that closes connections and one that does not, in each mode; exhaustive are all others.
    """
    pairs = [(failure, "backward") for failure in FAILURES]
    pairs += [("killed", moment) for moment in MOMENTS if moment != "backward"] + [("asleep", "forward")]
    return [
        (mode, *pair)
        for mode in (PARAMETERS, GRADIENTS)
        for pair in pairs
        if (pair in BY_DEFAULT[mode]) != exhaustive
    ]


def name_of(mode: str, failure: str, moment: str) -> str:
    return f"{mode}-{failure}-{moment.replace(' ', '_')}"


# One rank ----------------------------------------------------------------------------------------------


def train(folder: Path, job: tuple[str, str, str], rank: int) -> dict[str, Any]:
    """Train until a peer fails; return what was raised then, and what happens to whoever goes on regardless."""
    from headway.errors import CommunicationError

    mode, failure, moment = job
    _meet(folder / f"{name_of(*job)}-store", rank)
    faulthandler.dump_traceback_later(limits.stretched(LIMIT_S), exit=True)
    model = wrap(mlp(), mode)
    optimizer = sgd(model)
    fails_now = [False]
    failed_at = folder / f"{name_of(*job)}-failed"

    def fail_at(here: str) -> None:
        if fails_now[0] and here == moment:
            failed_at.write_text(str(time.monotonic()))
            FAILURES[failure]()

    model.module[2].register_forward_hook(lambda *_: fail_at("forward"))
    model.module[2].weight.register_hook(lambda _: fail_at("backward"))
    try:
        for step in range(STEPS):
            fails_now[0] = rank == CULPRIT and step == FAILS_AT
            optimizer.zero_grad()
            x, y = rows(4 * WORLD_SIZE, step)
            nn.functional.mse_loss(model(x[rank::WORLD_SIZE]), y[rank::WORLD_SIZE]).backward()
            fail_at("between backward and step")
            optimizer.step()
            fail_at("after step")
    except CommunicationError as error:
        noticed_s = time.monotonic() - float(failed_at.read_text())
        late = noticed_s > limits.stretched(NOTICED_S)
        return {"message": str(error), "late": late, "again": _attempts(model, optimizer)}
    return {"message": "nothing was raised", "late": False, "again": {}}


def _attempts(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What comes of using the model all the same: the class of what is raised, or nothing."""
    x, _ = rows(4, 0)
    attempts: dict[str, Callable[[], Any]] = {
        "parameters": lambda: [p.detach().clone() for p in model.parameters()],
        "data": lambda: [p.data.clone() for p in model.module.parameters()],
        "state_dict": lambda: [value.clone() for value in model.state_dict().values()],
        "forward": lambda: model(x).sum().backward(),
        "evaluation": lambda: model.module(x),
        "step": lambda: (optimizer.step(), [p.sum().item() for p in model.parameters()]),
        "flush": model.flush,
    }
    outcomes = {}
    for what, attempt in attempts.items():
        try:
            with torch.no_grad() if what == "evaluation" else torch.enable_grad():
                attempt()
            outcomes[what] = ""
        except Exception as error:
            outcomes[what] = type(error).__name__
    return outcomes


def _meet(store: Path, rank: int) -> None:
    """Form the group with a short timeout only when everybody is there: processes may take long to start."""
    file_store = FileStore(str(store), WORLD_SIZE)
    workers.meet(file_store, rank, WORLD_SIZE, limits.stretched(MEETING_TIMEOUT_S))
    timeout = timedelta(seconds=limits.stretched(GROUP_TIMEOUT_S))
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    dist.barrier()


# All of them -------------------------------------------------------------------------------------------


def _fork(folder: Path, job: tuple[str, str, str], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    base = folder / f"{name_of(*job)}-{rank}"
    output = os.open(f"{base}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    found: dict[str, Any] = {}
    try:
        found = train(folder, job, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise SystemExit(1) from None
    finally:
        Path(f"{base}.json").write_text(json.dumps(found))
    raise SystemExit(0)


def _run(folder: Path, which: str) -> None:
    import headway.strategies.decoupled.wrapper
    from headway.collectives import executor

    del headway
    executor.compiled()  # once for all: the short timeouts leave no time for it
    torch.set_num_threads(1)
    statuses: dict[str, int | None] = {}
    every = jobs(exhaustive=which == "exhaustive")
    for first in range(0, len(every), JOBS_AT_A_TIME):
        statuses |= _run_some(folder, every[first : first + JOBS_AT_A_TIME])
    (folder / "statuses.json").write_text(json.dumps(statuses))


def _run_some(folder: Path, some: Iterable[tuple[str, str, str]]) -> dict[str, int | None]:
    children = {}
    for job in some:
        for rank in range(WORLD_SIZE):
            children[_fork(folder, job, rank)] = (job, rank)
    limit = limits.Limit(limits.stretched(MEETING_TIMEOUT_S + LIMIT_S) + 5)
    statuses: dict[str, int | None] = {f"{name_of(*job)}-{rank}": None for job, rank in children.values()}
    survivors = {pid for pid, (_, rank) in children.items() if rank != CULPRIT}
    while survivors and not limit.over():
        time.sleep(0.05)
        for pid, (job, rank) in list(children.items()):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[f"{name_of(*job)}-{rank}"] = os.waitstatus_to_exitcode(ended[1])
                children.pop(pid)
                survivors.discard(pid)
    for pid in children:  # those that sleep or are stopped, and whoever hangs
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statuses


if __name__ == "__main__":
    _run(Path(sys.argv[1]), sys.argv[2])
