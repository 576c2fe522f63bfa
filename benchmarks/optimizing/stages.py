"""One rank of a pipeline: torch's schedules on its own runtime, and plans on Headway's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from paced_training.jobs import StepTime
from pipeline_training.stepping import mean_loss, on_torchs_runtime, stage_of, step_of
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from headway.plan import Plan
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.registry import plugin_of
from headway.torch_private.pipelining import PipelineSteps
from optimizing.cases import PipelineCase
from optimizing.spaces import pipeline_space
from optimizing.stock_search import StockSearch

TORCHS = {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}
DEFAULT = "torch 1F1B"
LEARNING_RATE = 1e-3


class Ordered:
    """This rank's stage, trained in one order."""

    def __init__(self, module: nn.Module, step: Callable[[], None]) -> None:
        self._module, self._step = module, step
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def restart(self) -> None:
        """Nothing is left of other methods."""

    def step(self) -> StepTime:
        """All micro-batches forward and backward, and the update; the time of both is in the first."""
        start = time.perf_counter()
        self._step()
        self._optimizer.step()
        return StepTime(time.perf_counter() - start, 0.0)

    def finish(self) -> None:
        """Nothing is in flight between steps."""

    def close(self) -> None:
        """A stage has nothing to give back."""


class Stages:
    """What a rank of ``case`` can train: all methods have the same module, each in a stage of its own."""

    def __init__(self, case: PipelineCase, *, quick: bool) -> None:
        self._case = case.at(quick=quick)
        self._module = stage_of(self._case)
        self._orders = {
            f"torch's runtime, {each.describe()}": each
            for each in pipeline_space(self._case.micro_batches)
            if isinstance(each, PipelineStrategy) and each.receive_buffers is None
        }

    def default(self) -> Ordered:
        """Torch's 1F1B."""
        return self.stock(DEFAULT)

    def stock(self, option: str) -> Ordered:
        """One of torch's schedules, or its own runtime with an order."""
        count = self._case.micro_batches
        if option in TORCHS:
            return self._ordered(lambda stage: TORCHS[option](stage, count, loss_fn=mean_loss))
        schedule = self._orders[option].schedule_of(self._case.stages)
        return self._ordered(lambda stage: on_torchs_runtime(stage, count, schedule))

    def planned(self, plan: Plan) -> Ordered:
        """A script's schedule that a plan takes over, as ``headway run`` does it."""
        return self._ordered(lambda stage: self._taken_over(stage, plan))

    def search(self, given: Sequence[Sequence[float]]) -> StockSearch[str]:
        """All of them are tried, and there are no others."""
        del given
        return StockSearch([*TORCHS, *self._orders], lambda _: [])

    def disagreements(self, trained: Sequence[Ordered]) -> list[float]:
        """None are known: all methods train the same module."""
        return [0.0 for _ in trained]

    def _ordered(self, make: Callable[[PipelineStage], Any]) -> Ordered:
        rank, device = dist.get_rank(), torch.device("cpu")
        stage = PipelineStage(self._module, rank, self._case.stages, device)
        return Ordered(self._module, step_of(self._case, self._module, make(stage)))

    def _taken_over(self, stage: PipelineStage, plan: Plan) -> Any:
        steps = Schedule1F1B(stage, self._case.micro_batches, loss_fn=mean_loss)
        injection = plugin_of(plan.strategy).schedule_injection
        assert injection is not None
        injection.take_over(PipelineSteps(steps), plan.strategy)
        return steps
