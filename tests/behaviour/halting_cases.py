"""Ranks that are told to end while they measure links and cores. Each function is one rank of ``tests.workers``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from headway.integrations import recorded
from headway.network import collective_costs
from headway.network.interference import timed

TOLD_AT = 3


def told_on_one_rank(rank: int, world_size: int, folder: str) -> list[object]:
    """Whether this rank was interrupted, what measuring left, and what an all-reduce of ones gives afterwards."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    recorded._permitted = lambda: True  # although these ranks meet in a file
    count = 0

    def told(*arguments: object) -> object:
        nonlocal count
        count += 1
        if rank == 1 and count == TOLD_AT:
            os.kill(os.getpid(), signal.SIGINT)
        assert count < TOLD_AT + 2
        return timed(*arguments)  # type: ignore[arg-type]

    collective_costs.timed = told  # type: ignore[assignment, attr-defined]
    is_interrupted = False
    try:
        recorded.measure("token", Path(folder), wanted=True)
    except KeyboardInterrupt:
        is_interrupted = True
    ones = torch.ones(1)
    dist.all_reduce(ones)
    heeds_as_before = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return [is_interrupted, count, os.listdir(folder), ones.item(), heeds_as_before]
