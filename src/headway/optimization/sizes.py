"""Other numbers of micro-batches than the recorded job's: those of other recordings of it, and those between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headway.errors import UserError
from headway.job import Job
from headway.replayer.replayer import Replayer
from headway.scheduling.pipeline.orders import LOOPED_ORDERS
from headway.simulator.expectation import Expectation
from headway.simulator.simulate import Simulation, Simulator
from headway.strategies.base import Strategy
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.micro_batch_sizes import (
    Interpolated,
    counts_between,
    first_difference,
    interpolated,
)
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_times import micro_batches
from headway.strategies.registry import plugin_of
from headway.trace.format import Trace


@dataclass(frozen=True)
class Size:
    """The job with ``count`` micro-batches: its computation, its replay, and what to expect of the live one.

    ``reproduced`` is the recorded step as a share of its replay, ``said`` where numbers come from if they were not
    recorded.
    """

    count: int
    job: Job
    replay: Callable[[Strategy], Simulation]
    expect: Callable[[Simulation], Expectation]
    reproduced: float
    said: str = ""


def script_micro_batches(recorded: Strategy, job: Job) -> int | None:
    """How many micro-batches the recorded script's own schedule has; None where its job is no pipeline.

    A plan that was in force may have changed that.
    """
    pipeline = recorded.pipeline if isinstance(recorded, MeshStrategy) else recorded
    if not isinstance(pipeline, PipelineStrategy):
        return None
    return pipeline.script_micro_batches or micro_batches(job.steps) or None


def for_script(strategy: Strategy, script: int | None) -> Strategy:
    """``strategy`` as a plan for a script whose own schedule has ``script`` micro-batches.

    A schedule of several stages a rank keeps its number: the script has to be changed.
    """
    if not isinstance(strategy, PipelineStrategy) or strategy.order in LOOPED_ORDERS:
        return strategy
    if script in (None, strategy.micro_batches):
        return strategy
    return strategy.model_copy(update={"script_micro_batches": script})


def others_of(first: Replayer, traces: Sequence[Trace]) -> list[Replayer]:
    """Replayers of other recordings of the same job, on the cluster of the first."""
    for trace in traces:
        if trace.world_size != first.trace.world_size:
            _refuse(
                "the world size", first, trace, *(f"{one.world_size} workers" for one in (first.trace, trace))
            )
    return [Replayer(each, first.cluster) for each in traces]


def sizes(first: Replayer, others: Sequence[Replayer]) -> list[Size]:
    """Numbers of micro-batches that ``others`` were recorded with, and those in between; without that of ``first``.

    Raises UserError where they are not recordings of the same pipeline with different numbers.
    """
    if not others:
        return []
    recorded: dict[int, Replayer] = {}
    for each in (first, *others):
        _check_same_job(first, each)
        count = micro_batches(each.job.steps)
        if count in recorded:
            raise UserError(
                "two recordings have the same number of micro-batches", got=f"{count} in {each.trace.path}",
                expected="one recording of each number", fix="Leave one of them out.",
            )  # fmt: skip
        recorded[count] = each
    own = micro_batches(first.job.steps)
    found = [_recorded(first, each, count) for count, each in recorded.items() if count != own]
    found += [
        _interpolated(first, recorded[fewer], recorded[more], count)
        for count, fewer, more in counts_between(tuple(recorded))
    ]
    return sorted(found, key=lambda each: each.count)


def _check_same_job(first: Replayer, other: Replayer) -> None:
    if len(first.job.stages) < 2 or not micro_batches(first.job.steps):
        raise UserError(
            "several recordings can only be compared of a pipeline", got=f"a model in one piece in {first.trace.path}",
            expected="one pipeline with different numbers of micro-batches", fix="Give one recording.",
        )  # fmt: skip
    different = first_difference(first.job, other.job)
    if different is None and _replicas(first) != _replicas(other):
        different = ("the replicas of stages", _replicas(first), _replicas(other))
    if different is not None:
        what, mine, others = different
        _refuse(what, first, other.trace, mine, others)


def _refuse(what: str, first: Replayer, other: Trace, mine: str, others: str) -> None:
    raise UserError(
        f"the recordings are of different jobs: they differ in {what}",
        got=f"{others} in {other.path}", expected=f"{mine} as in {first.trace.path}",
        fix="Record one script with other numbers of micro-batches, and change nothing else.",
    )  # fmt: skip


def _replicas(replayer: Replayer) -> str:
    strategy = replayer.recorded_strategy
    return strategy.data.describe() if isinstance(strategy, MeshStrategy) else "none"


def _recorded(first: Replayer, other: Replayer, count: int) -> Size:
    def expect(played: Simulation) -> Expectation:
        return replace(other.expect(played), recorded_ms=first.recorded_step_ms)

    reproduced = other.recorded_step_ms / other.base.step_ms
    return Size(count, other.job, other.replay, expect, reproduced)


def _interpolated(first: Replayer, fewer: Replayer, more: Replayer, count: int) -> Size:
    made = interpolated(fewer.job, more.job, count)
    simulator = Simulator()

    def replay(strategy: Strategy) -> Simulation:
        return simulator.simulate(made.job, plugin_of(strategy).as_run(strategy, made.job))

    ends = micro_batches(fewer.job.steps), micro_batches(more.job.steps)
    reproduced = min(each.recorded_step_ms / each.base.step_ms for each in (fewer, more))
    expect = partial(_expect_between, first, (fewer, more), made)
    return Size(count, made.job, replay, expect, reproduced, f"between {ends[0]} and {ends[1]}")


def _expect_between(
    first: Replayer, ends: tuple[Replayer, Replayer], made: Interpolated, played: Simulation
) -> Expectation:
    """As of the recording of which more is expected, with what interpolation may be off by."""
    expected = max((end.expect(played) for end in ends), key=lambda each: each.step_ms)
    uncertainty_ms = math.hypot(expected.uncertainty_ms, made.share * expected.step_ms)
    return Expectation(first.recorded_step_ms, expected.step_ms, uncertainty_ms)
