"""What a worker does with the copies that it averages in."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from headway.strategies.live.averaged import training_layout
from headway.strategies.partial_all_reduce.averaging import Averaging
from headway.strategies.partial_all_reduce.rounds import Copies, Ending, Round


class Rounds:
    """Fails once, and writes into that copy in the next round, as an all-reduce that was given up does."""

    worker = 0

    def __init__(self) -> None:
        self.given_up: Copies | None = None

    def run(self, iteration: int, copies: Copies) -> tuple[Round, None]:
        if self.given_up is None:
            self.given_up = copies
            return Round(iteration, Ending.ABORTED), None
        for mean in copies.mean.wholes:
            mean.fill_(2.0)
        for late in self.given_up.mean.wholes:
            late.fill_(99.0)
        return Round(iteration, Ending.COMMITTED), None


class InVain:
    """None of its groups takes a mean."""

    worker = 3

    def run(self, iteration: int, copies: Copies) -> tuple[Round, None]:
        return Round(iteration, Ending.ABORTED, members=(1, 3, 4), reason="it took too long"), None


class Coordinator:
    is_reachable = True

    def report(self, metrics: Any) -> None: ...


def averaging_with(rounds: Any, module: nn.Module) -> Averaging:
    coordinator: Any = Coordinator()
    return Averaging(
        rounds, coordinator, lambda: training_layout(module, None, buffers="averaged", moments="local"), staleness=0,
        time_limit_s=1.0, observer=None, heard=lambda _: None, writing=nullcontext,
    )  # fmt: skip


def test_groups_that_take_no_mean_one_after_the_other_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    averaging = averaging_with(InVain(), nn.Linear(3, 2))
    with torch.no_grad():
        for iteration in range(1, 30):
            averaging.after_step(iteration)
    (said,) = caplog.messages
    assert said == (
        "worker 3: 3 groups in a row failed to average, the last one with workers 1, 4: it took too long. The time "
        "limit of a group is 1 s (time_limit_s)"
    )


def test_an_all_reduce_that_was_given_up_writes_into_no_later_mean() -> None:
    module = nn.Linear(3, 2)
    averaging = averaging_with(Rounds(), module)
    with torch.no_grad():
        averaging.after_step(1)
        averaging.after_step(2)
    assert (averaging.aborted, averaging.committed) == (1, 1)
    assert all(bool((parameter == 2.0).all()) for parameter in module.parameters())
