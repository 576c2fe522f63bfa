"""Pipelines as a decision: in which order micro-batches go through the stages of a model."""

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
    """Micro-batches go through stages on different ranks in a given order.

    Gradients are the same in every order. Orders differ in how long ranks wait for messages and for each other, and in
    how many micro-batches' activations they hold.
    """

    name: ClassVar[str] = "pipeline"
    dimension: ClassVar[str] = PIPELINE

    micro_batches: int | None = Field(default=None, ge=1, le=4096)
    """How many micro-batches a batch is split into; by default as many as were recorded."""
    script_micro_batches: int | None = Field(default=None, ge=1, le=4096)
    """How many the script's own schedule is constructed with, where the plan changes that: a step then hands back as
    many losses as there are `micro_batches`. A script of another number is refused."""
    order: Literal[
        "kfkb", "1f1b", "gpipe", "eager-1f1b", "zero-bubble", "interleaved", "looped", "recorded"
    ] = "1f1b"
    """The order of forwards and backwards. `kfkb` alternates between `group_size` forwards and as many backwards;
    `interleaved` (1F1B) and `looped` (GPipe) are for several stages a rank, stage `s` on rank `s` modulo their number;
    `recorded` is that of a recording, whatever it was, and is only replayed."""
    group_size: int = Field(default=1, ge=1)
    """For `kfkb`: the number of micro-batches in a group. While one of them is being sent, the others are computed; a
    stage holds `group_size` times the activations of `1f1b`."""
    group_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), max_length=64)
    """For `kfkb`: other sizes of groups that the job may go over to while it trains, as its network changes. It begins
    with `group_size`; where there are none, it stays at it."""
    other_orders: tuple[Literal["gpipe", "eager-1f1b", "zero-bubble"], ...] = Field(default=(), max_length=3)
    """For `kfkb`: other orders that it may go over to likewise."""
    receive_buffers: int | None = Field(default=None, ge=1)
    """How many messages from each neighbour may be in flight at a time; by default the size of a group."""
    split_points: tuple[str, ...] = ()
    """The names of the modules at which a new stage begins, in the order of forward."""

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
        """Whether the order is changed while the job trains."""
        return self.follows_network

    @property
    def follows_network(self) -> bool:
        """Whether it may go over to another order while the job trains."""
        return bool(self.group_sizes or self.other_orders)

    def decide(self, job: Job) -> PipelineSchedule:
        """The order of every rank.

        Raises PlanError for a model that is not cut into stages, and where the number of micro-batches is unknown.
        """
        if len(job.stages) < 2:
            raise PlanError(
                "a pipeline needs a model that is cut into stages", got="a model in one piece",
                fix="Record a job that trains with torch.distributed.pipelining.",
            )  # fmt: skip
        if self.order == RECORDED:
            return RecordedPipelineSchedule(recorded_actions(job.steps), micro_batches(job.steps))
        return self.spelled_out(job).schedule_of(
            len(job.stages), dict(job.mesh).get(PIPELINE, job.world_size)
        )

    def spelled_out(self, job: Job) -> Self:
        """The same with the number of micro-batches that were recorded. Raises PlanError where none were."""
        if self.micro_batches is not None:
            return self
        recorded = micro_batches(job.computation) if job.computation is not None else None
        resolved = self.model_copy(update={"micro_batches": recorded or None})
        resolved.count()
        return resolved

    def count(self) -> int:
        """The number of micro-batches. Raises PlanError where nothing says it."""
        if self.micro_batches is None:
            raise PlanError(
                "nothing says how many micro-batches a batch is split into", fix="Give micro_batches."
            )
        return self.micro_batches

    def schedule_of(self, stages: int, ranks: int | None = None) -> PipelineSchedule:
        """The order of every rank of a pipeline of so many stages on ``ranks``, by default as many.

        Raises PlanError for too few buffers, and for an order that is not one of so many stages a rank.
        """
        schedule = self._order_of(stages, stages if ranks is None else ranks)
        least = schedule.receive_buffers
        if self.receive_buffers is not None and self.receive_buffers < least:
            raise PlanError(
                "the plan has too few receive buffers for this order: ranks could wait for each other forever",
                got=f"receive_buffers: {self.receive_buffers}", expected=f"at least {least} for {self.describe()}",
            )  # fmt: skip
        return replace(schedule, receive_buffers=self.receive_buffers or least)

    def _order_of(self, stages: int, ranks: int) -> PipelineSchedule:
        count = self.micro_batches
        assert count is not None
        assert self.order != RECORDED
        if (self.order in LOOPED_ORDERS) != (stages > ranks):
            raise PlanError(
                "the plan's order is for another number of stages a rank",
                got=f"{stages} stages on {ranks} ranks", expected=self._stages_expected(ranks),
                fix=f"Use one of {', '.join(LOOPED_ORDERS)}." if stages > ranks else "Use another order.",
            )  # fmt: skip
        if self.order == GROUPED:
            return grouped(stages, count, self.group_size)
        if self.order not in LOOPED_ORDERS:
            return ORDERS[self.order](stages, count)
        if stages % ranks or (self.order == "interleaved" and count % ranks):
            raise PlanError(
                f"{_WORDS[self.order]} needs as many stages on every rank"
                + (", and rounds of as many micro-batches as there are ranks" * (self.order == "interleaved")),
                got=f"{stages} stages and {count} micro-batches on {ranks} ranks", expected=f"multiples of {ranks}",
            )  # fmt: skip
        return LOOPED_ORDERS[self.order](ranks, stages // ranks, count)

    def _stages_expected(self, ranks: int) -> str:
        return f"a multiple of {ranks} stages" if self.order in LOOPED_ORDERS else "one stage a rank"

    def describe(self) -> str:
        """Say the order and how many micro-batches there are."""
        order = f"{self.group_size}F{self.group_size}B" if self.order == GROUPED else _WORDS[self.order]
        if self.follows_network:
            order += ", following the network"
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches else ""
        if self.script_micro_batches not in (None, self.micro_batches):
            parts += f" instead of {self.script_micro_batches}"
        return f"pipeline, {order}{parts}"


def check_whole_backwards(schedule: PipelineSchedule, strategy: PipelineStrategy) -> None:
    """Raise PlanError for halved backwards: DDP would not see the gradients of weights, and leave them as they are."""
    if any(action.kind is Pass.WEIGHT_GRADIENT for rank in schedule.ranks for action in rank):
        raise PlanError(
            "DDP cannot reduce the gradients of a stage whose backwards are halved",
            got=strategy.describe(), expected="an order with whole backwards",
            fix="Use another order than zero-bubble, one pipeline, or stages that are not wrapped.",
        )  # fmt: skip


def grouped_by(strategy: Strategy) -> int | None:
    """The size of its groups, where it alternates between forwards and backwards of groups; of 1F1B that is one."""
    if not isinstance(strategy, PipelineStrategy) or strategy.order not in (GROUPED, "1f1b"):
        return None
    return strategy.group_size
