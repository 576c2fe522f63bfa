"""Timing the modules of a stage: each module's part of a pass, on a clock that only they advance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headway.recording import pipelines
from headway.recording.chains import ChainWatch
from headway.recording.pipelines import ChainTimer


class Clock:
    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


class Takes(torch.autograd.Function):
    """Takes ``ns`` of the clock in forward, twice as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, ns: int) -> torch.Tensor:
        ctx.clock, ctx.ns = clock, ns
        clock.now_ns += ns
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.clock.now_ns += 2 * ctx.ns
        return gradients[0], None, None


class Slow(nn.Module):
    def __init__(self, clock: Clock, ns: int) -> None:
        super().__init__()
        self.clock, self.ns = clock, ns
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Takes.apply(x * self.weight, self.clock, self.ns)  # type: ignore[no-untyped-call]
        return out


def test_passes_are_divided_among_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pipelines, "time", clock)
    stage = nn.Sequential(Slow(clock, 5), Slow(clock, 7), nn.Tanh(), Slow(clock, 1))
    given = torch.ones(2, 3, requires_grad=True)
    watch = ChainWatch()
    watch.arm(stage)
    stage(given)
    assert watch.found is not None
    times = ChainTimer(stage, watch.found)
    for _ in range(3):
        out = times.forward(lambda: stage(given))
        times.backward(lambda out=out: torch.autograd.backward(out.sum()))  # type: ignore[misc]
    times.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in stage.modules())
    found = times.timed().links
    assert [link.forward_ns for link in found] == [5, 7, 0, 1]
    assert [link.backward_ns for link in found] == [10, 14, 0, 2]


def test_what_was_not_seen_whole_is_not_timed() -> None:
    stage = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    watch = ChainWatch()
    watch.arm(stage)
    stage(torch.ones(2, 3))
    assert watch.found is not None
    times = ChainTimer(stage, watch.found)
    times.forward(lambda: stage[0](torch.ones(2, 3)))
    assert times.timed() == watch.found
    times.detach()
