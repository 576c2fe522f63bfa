"""An optimizer's time is told from that of the closure that it calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headway.recording.watches import UpdateWatch

SGD: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
LBFGS: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.LBFGS(parameters, max_iter=3)  # noqa: E731


class Job:
    """A model that an optimizer steps while a watch looks on."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.stretches: list[tuple[int, int]] = []
        self.begins = 0
        self.closures: list[tuple[int, int]] = []
        self.model = nn.Linear(3, 1)
        self.optimizer = make(self.model.parameters())
        self.watch = UpdateWatch(lambda _name, start, end: self.stretches.append((start, end)), self._begin)

    def _begin(self) -> None:
        self.begins += 1

    def closure(self) -> torch.Tensor:
        start_ns = time.monotonic_ns()
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.ones(2, 3)).square().sum()
        loss.backward()
        self.closures.append((start_ns, time.monotonic_ns()))
        return loss

    def step(self, *args: Any, **kwargs: Any) -> Any:
        before = register_optimizer_step_pre_hook(
            lambda _o, args, kwargs: self.watch.step_begins("it", args, kwargs)
        )
        after = register_optimizer_step_post_hook(lambda *_: self.watch.step_ends("it", time.monotonic_ns()))
        try:
            return self.optimizer.step(*args, **kwargs)
        finally:
            before.remove()
            after.remove()


def test_without_a_closure_a_step_is_one_stretch() -> None:
    job = Job(SGD)
    job.closure()
    job.step()
    ((start_ns, end_ns),) = job.stretches
    assert job.closures[0][1] <= start_ns < end_ns
    assert job.begins == 1


@pytest.mark.parametrize("by_name", [False, True])
def test_the_update_begins_when_the_closure_has_returned(*, by_name: bool) -> None:
    job = Job(SGD)
    loss = job.step(closure=job.closure) if by_name else job.step(job.closure)
    assert loss.requires_grad
    ((start_ns, end_ns),) = job.stretches
    assert job.closures[0][1] <= start_ns < end_ns


def test_an_optimizer_that_calls_its_closure_several_times_updates_between() -> None:
    job = Job(LBFGS)
    job.step(job.closure)
    assert len(job.closures) > 1
    assert len(job.stretches) == len(job.closures)
    for closure, stretch in zip(job.closures, job.stretches, strict=True):
        assert closure[1] <= stretch[0]
    for stretch, closure in zip(job.stretches, job.closures[1:], strict=False):
        assert stretch[1] <= closure[0]


def test_a_closure_that_raises_leaves_no_stretch() -> None:
    job = Job(SGD)

    def fails() -> float:
        raise KeyError

    with pytest.raises(KeyError):
        job.step(fails)
    assert job.stretches == []
