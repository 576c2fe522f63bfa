"""Decides the order in which micro-batches pass through the stages of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import PlanError
from headway.job import Job
from headway.scheduling.pipeline.orders import LOOPED_ORDERS, ORDERS, grouped
from headway.scheduling.pipeline.schedule import Pass, PipelineSchedule, RecordedPipelineSchedule
from headway.strategies.base import PIPELINE, Strategy
from headway.strategies.pipeline.stage_times import micro_batches, recorded_actions

GROUPED, RECORDED = "kfkb", "recorded"
_WORDS = {
    "1f1b": "1F1B", "gpipe": "GPipe", "eager-1f1b": "eager 1F1B", "zero-bubble": "zero bubble",
    "interleaved": "interleaved 1F1B", "looped": "looped GPipe", "recorded": "as recorded",
}  # fmt: skip


class PipelineStrategy(Strategy):
    """A pipeline of stages on different ranks, with an order of forwards and backwards.

    All orders give the same gradients. They differ in how long ranks wait for each other, and in how many
    micro-batches' activations they hold.
    """

    name: ClassVar[str] = "pipeline"
    dimension: ClassVar[str] = PIPELINE

    micro_batches: int | None = Field(default=None, ge=1, le=4096)
    """The number of micro-batches per batch; by default the recorded number."""
    script_micro_batches: int | None = Field(default=None, ge=1, le=4096)
    """The number in the script's own schedule, if the plan changes it: a step then returns `micro_batches` losses. A
    script with another number is refused."""
    order: Literal[
        "kfkb", "1f1b", "gpipe", "eager-1f1b", "zero-bubble", "interleaved", "looped", "recorded"
    ] = "1f1b"
    """The order of forwards and backwards. `kfkb` alternates between `group_size` forwards and as many backwards;
    `interleaved` (1F1B) and `looped` (GPipe) need several stages per rank, with stage `s` on rank `s % ranks`;
    `recorded` is the order of the recording and can only be replayed."""
    group_size: int = Field(default=1, ge=1)
    """For `kfkb`: the number of micro-batches in a group. While one is sent, the next are computed; a stage holds
    `group_size` times the activations of `1f1b`."""
    group_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), max_length=64)
    """For `kfkb`: other group sizes that the job may switch to during training when the network changes. It starts with
    `group_size`."""
    other_orders: tuple[Literal["gpipe", "eager-1f1b", "zero-bubble"], ...] = Field(default=(), max_length=3)
    """For `kfkb`: other orders that the job may switch to during training."""
    receive_buffers: int | None = Field(default=None, ge=1)
    """The number of messages from each neighbour that may be in flight; by default the group size."""
    split_points: tuple[str, ...] = ()
    """The names of the modules at which a new stage begins, in forward order."""

    @model_validator(mode="after")
    def _groups_are_asked_for(self) -> PipelineStrategy:
        if self.group_size != 1 and self.order != GROUPED:
            raise ValueError(f"group_size is an option of the order kfkb, not of {self.order}")
        if self.follows_network and self.order != GROUPED:
            option = "group_sizes" if self.group_sizes else "other_orders"
            raise ValueError(f"{option} is an option of the order kfkb, not of {self.order}")
        return self

    @property
    def decides_while_training(self) -> bool:
        """Whether the order may change during training."""
        return self.follows_network

    @property
    def follows_network(self) -> bool:
        """Whether a tuner may switch to another order during training."""
        return bool(self.group_sizes or self.other_orders)

    def decide(self, job: Job) -> PipelineSchedule:
        """The order of every rank.

        Raises PlanError if the model is not split into stages or the number of micro-batches is unknown.
        """
        if len(job.stages) < 2:
            raise PlanError(
                "a pipeline needs a model that is split into stages", got="a model in one piece",
                fix="Record a job that trains with torch.distributed.pipelining.",
            )  # fmt: skip
        if self.order == RECORDED:
            return RecordedPipelineSchedule(recorded_actions(job.steps), micro_batches(job.steps))
        return self.spelled_out(job).schedule_of(
            len(job.stages), dict(job.mesh).get(PIPELINE, job.world_size)
        )

    def spelled_out(self, job: Job) -> Self:
        """The same with the recorded number of micro-batches. Raises PlanError if there is none."""
        if self.micro_batches is not None:
            return self
        recorded = micro_batches(job.computation) if job.computation is not None else None
        resolved = self.model_copy(update={"micro_batches": recorded or None})
        resolved.count()
        return resolved

    def count(self) -> int:
        """The number of micro-batches. Raises PlanError if it is unknown."""
        if self.micro_batches is None:
            raise PlanError("the number of micro-batches is unknown", fix="Set micro_batches in the plan.")
        return self.micro_batches

    def schedule_of(self, stages: int, ranks: int | None = None) -> PipelineSchedule:
        """The order of every rank of a pipeline of ``stages`` on ``ranks`` (by default one stage per rank).

        Raises PlanError for too few receive buffers, or an order that does not fit the number of stages per rank.
        """
        schedule = self._order_of(stages, stages if ranks is None else ranks)
        least = schedule.receive_buffers
        if self.receive_buffers is not None and self.receive_buffers < least:
            raise PlanError(
                "receive_buffers is too small for this order: ranks could deadlock",
                got=f"receive_buffers: {self.receive_buffers}", expected=f"at least {least} for {self.describe()}",
            )  # fmt: skip
        return replace(schedule, receive_buffers=self.receive_buffers or least)

    def _order_of(self, stages: int, ranks: int) -> PipelineSchedule:
        count = self.micro_batches
        assert count is not None
        assert self.order != RECORDED
        if (self.order in LOOPED_ORDERS) != (stages > ranks):
            raise PlanError(
                "the plan's order does not fit the number of stages per rank",
                got=f"{stages} stages on {ranks} ranks", expected=self._stages_expected(ranks),
                fix=f"Use one of {', '.join(LOOPED_ORDERS)}." if stages > ranks else "Use another order.",
            )  # fmt: skip
        if self.order == GROUPED:
            return grouped(stages, count, self.group_size)
        if self.order not in LOOPED_ORDERS:
            return ORDERS[self.order](stages, count)
        if stages % ranks or (self.order == "interleaved" and count % ranks):
            raise PlanError(
                f"{_WORDS[self.order]} needs the same number of stages on every rank"
                + (", and micro-batches in multiples of the number of ranks" * (self.order == "interleaved")),
                got=f"{stages} stages and {count} micro-batches on {ranks} ranks", expected=f"multiples of {ranks}",
            )  # fmt: skip
        return LOOPED_ORDERS[self.order](ranks, stages // ranks, count)

    def _stages_expected(self, ranks: int) -> str:
        return f"a multiple of {ranks} stages" if self.order in LOOPED_ORDERS else "one stage per rank"

    def describe(self) -> str:
        """Name the order and the number of micro-batches."""
        order = f"{self.group_size}F{self.group_size}B" if self.order == GROUPED else _WORDS[self.order]
        if self.follows_network:
            order += ", following the network"
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches else ""
        if self.script_micro_batches not in (None, self.micro_batches):
            parts += f" instead of {self.script_micro_batches}"
        return f"pipeline, {order}{parts}"


def check_whole_backwards(schedule: PipelineSchedule, strategy: PipelineStrategy) -> None:
    """Raise PlanError for split backward passes: DDP would not see, and not reduce, their weight gradients."""
    if any(action.kind is Pass.WEIGHT_GRADIENT for rank in schedule.ranks for action in rank):
        raise PlanError(
            "DDP cannot reduce a stage's gradients when backward passes are split",
            got=strategy.describe(), expected="an order that does not split backward passes",
            fix="Use an order other than zero-bubble, a single pipeline, or stages without DDP.",
        )  # fmt: skip


def grouped_by(strategy: Strategy) -> int | None:
    """The group size of kFkB (1 for 1F1B); None for other strategies."""
    if not isinstance(strategy, PipelineStrategy) or strategy.order not in (GROUPED, "1f1b"):
        return None
    return strategy.group_size
