"""Ranks of tests end, print and hash as processes do that were started."""

from __future__ import annotations

import atexit
import os
import signal
import sys

import pytest
from tests import workers

pytestmark = pytest.mark.processes

HERE = "tests.test_workers"


def leaves(rank: int, _world_size: int, how: str) -> int:
    atexit.register(lambda: print(f"rank {rank} is at its end"))
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raised":
        raise ValueError("a fault")
    if how == "exited":
        sys.exit(7)
    return hash("a name")


def test_what_ranks_return_comes_back_and_strings_hash_differently() -> None:
    first, second, third = workers.run(3, f"{HERE}:leaves", "returned")
    assert first == third != second


@pytest.mark.parametrize(
    ("how", "status"), [("returned", 0), ("raised", 1), ("exited", 7), ("killed", -signal.SIGKILL)]
)
def test_exit_handlers_run_and_statuses_are_told(how: str, status: int) -> None:
    (worker,) = workers.launch(1, f"{HERE}:leaves", how)
    assert worker.status == status
    assert ("rank 0 is at its end" in worker.output) == (how != "killed")
    assert ("ValueError: a fault" in worker.output) == (how == "raised")
