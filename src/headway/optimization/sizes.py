"""Predicts the job with other numbers of micro-batches, from further recordings or by interpolation."""

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
    """The job with ``count`` micro-batches: how to replay it, and how to turn a replay into an expectation.

    ``reproduced`` = recorded step / replayed step. ``origin`` says between which recordings times were between.
    """

    count: int
    job: Job
    replay: Callable[[Strategy], Simulation]
    expect: Callable[[Simulation], Expectation]
    reproduced: float
    origin: str = ""


def script_micro_batches(recorded: Strategy, job: Job) -> int | None:
    """The number of micro-batches of the script's own schedule, or None if the job is not a pipeline.

    A plan in force during the recording may have changed the number that was recorded.
    """
    pipeline = recorded.pipeline if isinstance(recorded, MeshStrategy) else recorded
    if not isinstance(pipeline, PipelineStrategy):
        return None
    return pipeline.script_micro_batches or micro_batches(job.steps) or None


def for_script(strategy: Strategy, script: int | None) -> Strategy:
    """``strategy`` as a plan for a script whose own schedule has ``script`` micro-batches.

    A schedule with several stages per rank keeps its own number, because the script has to change anyway.
    """
    if not isinstance(strategy, PipelineStrategy) or strategy.order in LOOPED_ORDERS:
        return strategy
    if script in (None, strategy.micro_batches):
        return strategy
    return strategy.model_copy(update={"script_micro_batches": script})


def others_of(first: Replayer, traces: Sequence[Trace]) -> list[Replayer]:
    """Replayers of further recordings of the job, on the cluster of the first."""
    for trace in traces:
        if trace.world_size != first.trace.world_size:
            _refuse(
                "the world size",
                first,
                trace,
                *(f"{recording.world_size} workers" for recording in (first.trace, trace)),
            )
    return [Replayer(trace, first.cluster) for trace in traces]


def sizes(first: Replayer, other_recordings: Sequence[Replayer]) -> list[Size]:
    """The numbers of micro-batches in ``other_recordings`` and between them, without that of ``first``.

    Raises UserError unless all are recordings of the same pipeline with different numbers.
    """
    if not other_recordings:
        return []
    recorded: dict[int, Replayer] = {}
    for replayer in (first, *other_recordings):
        _check_same_job(first, replayer)
        count = micro_batches(replayer.job.steps)
        if count in recorded:
            raise UserError(
                "two recordings have the same number of micro-batches", got=f"{count} in {replayer.trace.path}",
                expected="one recording for each number", fix="Leave one of them out.",
            )  # fmt: skip
        recorded[count] = replayer
    first_count = micro_batches(first.job.steps)
    results = [
        _recorded(first, replayer, count) for count, replayer in recorded.items() if count != first_count
    ]
    results += [
        _interpolated(first, recorded[fewer], recorded[more], count)
        for count, fewer, more in counts_between(tuple(recorded))
    ]
    return sorted(results, key=lambda replayer: replayer.count)


def _check_same_job(first: Replayer, replayer: Replayer) -> None:
    if len(first.job.stages) < 2 or not micro_batches(first.job.steps):
        raise UserError(
            "only recordings of a pipeline can be compared", got=f"no pipeline in {first.trace.path}",
            expected="one pipeline with different numbers of micro-batches", fix="Pass a single recording.",
        )  # fmt: skip
    different = first_difference(first.job, replayer.job)
    if different is None and _replicas(first) != _replicas(replayer):
        different = ("the replicas of stages", _replicas(first), _replicas(replayer))
    if different is not None:
        what, expected, got = different
        _refuse(what, first, replayer.trace, expected, got)


def _refuse(what: str, first: Replayer, trace: Trace, expected: str, got: str) -> None:
    raise UserError(
        f"the recordings are of different jobs; they differ in {what}",
        got=f"{got} in {trace.path}", expected=f"{expected} as in {first.trace.path}",
        fix="Record the same script and change only the number of micro-batches.",
    )  # fmt: skip


def _replicas(replayer: Replayer) -> str:
    strategy = replayer.recorded_strategy
    return strategy.data.describe() if isinstance(strategy, MeshStrategy) else "none"


def _recorded(first: Replayer, replayer: Replayer, count: int) -> Size:
    def expect(played: Simulation) -> Expectation:
        return replace(replayer.expect(played), recorded_ms=first.recorded_step_ms)

    reproduced = replayer.recorded_step_ms / replayer.base.step_ms
    return Size(count, replayer.job, replayer.replay, expect, reproduced)


def _interpolated(first: Replayer, fewer: Replayer, more: Replayer, count: int) -> Size:
    between = interpolated(fewer.job, more.job, count)
    simulator = Simulator()

    def replay(strategy: Strategy) -> Simulation:
        return simulator.simulate(between.job, plugin_of(strategy).as_run(strategy, between.job))

    ends = micro_batches(fewer.job.steps), micro_batches(more.job.steps)
    reproduced = min(end.recorded_step_ms / end.base.step_ms for end in (fewer, more))
    expect = partial(_expect_between, first, (fewer, more), between)
    return Size(count, between.job, replay, expect, reproduced, f"between {ends[0]} and {ends[1]}")


def _expect_between(
    first: Replayer, ends: tuple[Replayer, Replayer], between: Interpolated, played: Simulation
) -> Expectation:
    """The slower expectation of both ends, with the uncertainty of the interpolation added."""
    expected = max((end.expect(played) for end in ends), key=lambda expectation: expectation.step_ms)
    uncertainty_ms = math.hypot(expected.uncertainty_ms, between.share * expected.step_ms)
    return Expectation(first.recorded_step_ms, expected.step_ms, uncertainty_ms)
