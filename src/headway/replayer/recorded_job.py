"""The job that a trace is of: its computation without waits, its optimizers, and what its model permits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from headway.cluster import Cluster
from headway.graph.computation import Computation
from headway.graph.recorded import timelines_of
from headway.graph.timeline import Timeline
from headway.job import Job, OptimizerUse
from headway.replayer.measured_effects import measured_effects
from headway.replayer.recorded_mesh import recorded_mesh
from headway.trace.events import Event, Kind
from headway.trace.format import Trace


def recorded_job(trace: Trace, cluster: Cluster, *, has_parameters: bool = True) -> Job:
    """The job of ``trace`` on ``cluster``, which has as many workers.

    ``has_parameters`` is False where the trace names buckets for parameters. Raises TraceError as
    ``timelines_of`` does.
    """

    def timelines(factors: Mapping[str, float]) -> dict[int, tuple[Timeline, ...]]:
        return {
            rank: tuple(timeline.undisturbed(cluster.compute_slowdown) for timeline in own)
            for rank, own in timelines_of(trace, factors).items()
        }

    refusals = (info.refusals for info in reversed(trace.manifest.ranks))
    return Job(
        stages=trace.stages or (trace.model,),
        boundary_bytes=boundary_bytes(trace),
        mesh=recorded_mesh(trace),
        world_size=trace.world_size,
        cluster=cluster,
        computation=Computation(timelines({}), with_factors=timelines),
        optimizers=_optimizers(trace),
        refusals={name: why for own in refusals for name, why in own.items()},
        has_parameters=has_parameters,
        measured=measured_effects(trace),
    )


def boundary_bytes(trace: Trace) -> tuple[int, ...]:
    """What each stage of a pipeline but the last hands on of one micro-batch: the size of its messages, in the median.

    Activations and their gradients are as large as each other.
    """
    if not trace.stages:
        return ()
    sizes: dict[int, list[int]] = defaultdict(list)
    for events in trace.events.values():
        rows: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
        for row in events.of_kind(Kind.SEND):
            if row.stage >= 0:
                rows[row.step, row.stage, row.micro_batch].append(row)
        for (_, stage, _), own in rows.items():
            for boundary, row in zip(_boundaries(stage, own, trace.ranks_of_stages), own, strict=True):
                sizes[boundary].append(row.size_bytes)
    return tuple(round(median(sizes[stage] or [0])) for stage in range(len(trace.stages) - 1))


def _boundaries(stage: int, rows: Sequence[Event], ranks_of: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """Which boundary each message of one micro-batch that ``stage`` sent has crossed, in the order in which it did.

    Where the stages before and behind are on one rank, the first half are activations, the others gradients.
    """
    both = [
        row.peer in ranks_of.get(stage + 1, ()) and row.peer in ranks_of.get(stage - 1, ()) for row in rows
    ]
    activations_left = sum(both) // 2
    for row, is_both in zip(rows, both, strict=True):
        forward = row.peer in ranks_of.get(stage + 1, ())
        if is_both:
            forward = activations_left > 0
            activations_left -= 1
        yield stage if forward else stage - 1


def _optimizers(trace: Trace) -> OptimizerUse:
    """The optimizers that stepped, and how many updates follow one backward, on one rank, in most recorded steps."""
    names = {row.name for events in trace.events.values() for row in events.of_kind(Kind.OPTIMIZER)}
    rows = trace.events[min(trace.events)].of_kind(Kind.BACKWARD_PASS, Kind.OPTIMIZER)
    most: Counter[int] = Counter()
    behind = 0
    for index in np.argsort(rows.start_ns, kind="stable").tolist():
        behind = behind + 1 if rows.kind[index] == Kind.OPTIMIZER else 0
        step = int(rows.step[index])
        most[step] = max(most[step], behind)
    return OptimizerUse(tuple(sorted(filter(None, names))), median(most.values() or [0]))
