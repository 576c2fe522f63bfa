"""What ranks do for the tests of adapting: their network becomes slow while they train, and fast again."""

from __future__ import annotations

import gc
import logging
import os
import socket
import stat
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.behaviour.adaptive_models import adaptive
from tests.behaviour.tuning_cases import batch, seen
from torch import nn

from headway.api import strategy
from headway.errors import UnsupportedError
from headway.strategies.adaptive import watching
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decisions import DECISIONS_VARIABLE
from headway.strategies.decoupled import links
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.channels import observer as observing
from headway.strategies.registry import plugin_of

SO_MAX_PACING_RATE = 47
UNLIMITED = 2**64 - 1
SLOW_BYTES_PER_S = 4_000_000  # so much slower that other load on the machine hides nothing
FAST_BYTES_PER_S = 4 * SLOW_BYTES_PER_S  # and so slow that it makes no two links differ by much
WIDTH = 224
FAST_STEPS, SLOW_STEPS = 60, 120
Optimizer = torch.optim.Optimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    ).double()


def pace(bytes_per_s: int) -> int:
    """Have the kernel send no faster on any connection of this process; returns how many there are."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                rate = struct.pack("=Q", bytes_per_s)
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
                found += 1
    return found


def step_of(model: nn.Module, optimizer: Optimizer, step: int, rank: int, world_size: int) -> None:
    optimizer.zero_grad()
    x, y = batch(step, rank, world_size)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def slowed(
    rank: int, world_size: int, decisions: str, adapt: bool, begin_as: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Training on a network that becomes slow, where given in stock DDP at first."""
    logging.getLogger("headway").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "WINDOW_MS", 20.0)  # steps are short here
        patch.setenv(DECISIONS_VARIABLE, decisions)
        options = {"bucket_cap_bytes": 2**16, "adapt": adapt, "begin_as": begin_as}
        wrapped: Any = plugin_of(began := strategy("decoupled", **options)).wrap(net(), began)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        for step in range(FAST_STEPS):
            step_of(wrapped, optimizer, step, rank, world_size)
        paced = pace(SLOW_BYTES_PER_S)
        for step in range(FAST_STEPS, FAST_STEPS + SLOW_STEPS):
            step_of(wrapped, optimizer, step, rank, world_size)
        pace(UNLIMITED)
        result = seen(wrapped, optimizer)
        tuned = getattr(wrapped, "tuning", None)
        watched = getattr(wrapped, "tuner", None) is not None
        del wrapped, optimizer
        gc.collect()
    return result | {
        "paced": paced, "watched": watched, "observer": type(observing.observer()).__name__,
        "tuned": None if tuned is None else [each.strategy.describe() for each in tuned.candidates],
        "decisions": Path(decisions).exists(),
    }  # fmt: skip


def with_one_slow_link(rank: int, world_size: int, decisions: str) -> dict[str, Any]:
    """Training where the last rank's link becomes slow: what was tried, and what stayed."""
    logging.getLogger("headway").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "WINDOW_MS", 20.0)
        patch.setattr(links, "apart", lambda _hosts: True)  # ranks of one host stand for as many hosts
        patch.setenv(DECISIONS_VARIABLE, decisions)
        wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=2**16), adapt=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        for step in range(FAST_STEPS):
            step_of(wrapped, optimizer, step, rank, world_size)
            if step == 0:  # with it all channels have connections
                pace(FAST_BYTES_PER_S)
        tuned_early = wrapped.tuning is not None
        if rank == world_size - 1:
            pace(SLOW_BYTES_PER_S)
        for step in range(FAST_STEPS, FAST_STEPS + SLOW_STEPS):
            step_of(wrapped, optimizer, step, rank, world_size)
        pace(UNLIMITED)
        result = seen(wrapped, optimizer)
        tuned = wrapped.tuning
    return result | {
        "tried": [] if tuned is None else [each.strategy.model_dump() for each in tuned.candidates],
        "tuned early": tuned_early,
    }


def alone(world_size: int) -> dict[str, Any]:
    """The same in one process."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(FAST_STEPS + SLOW_STEPS):
        step_of(model, optimizer, step, -1, world_size)
    return seen(model, optimizer)


def dropped(rank: int, world_size: int) -> bool:
    """Whether a model that is watched is let go of with its last reference, without the collector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "WINDOW_MS", 20.0)
        wrapped: Any = adaptive(net(), DecoupledStrategy(bucket_cap_bytes=2**16), adapt=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(FAST_STEPS):
            step_of(wrapped, optimizer, step, rank, world_size)
        gc.collect()
        gc.disable()
        kept = weakref.ref(wrapped)
        del wrapped, optimizer
        gone = kept() is None
        gc.enable()
        gc.collect()
    return gone


def compiled(_rank: int, _world_size: int) -> str:
    """Why a plan of stock DDP does not adapt a compiled model."""
    begins_as = DistributedDataParallelStrategy()
    try:
        adaptive(torch.compile(net()), begins_as, adapt=True)  # type: ignore[arg-type]
    except UnsupportedError as refusal:
        return str(refusal)
    return ""
