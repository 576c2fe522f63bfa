"""The job that a trace is of: its computation without waits, its optimizers, and what its model permits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import median

import numpy as np

from headway.cluster import Cluster
from headway.graph.computation import Computation
from headway.graph.recorded import timelines_of
from headway.graph.timeline import Timeline
from headway.job import Job, OptimizerUse
from headway.replayer.recorded_mesh import recorded_mesh
from headway.trace.events import Kind
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
    )


def boundary_bytes(trace: Trace) -> tuple[int, ...]:
    """What each stage of a pipeline but the last hands on of one micro-batch: the size of its messages, in the median.

    Activations and their gradients are as large as each other.
    """
    sizes: dict[int, list[int]] = defaultdict(list)
    stage_of = {
        rank: int(events.stage.max(initial=-1)) for rank, events in trace.events.items() if trace.stages
    }
    for rank, stage in stage_of.items():
        for row in trace.events[rank].of_kind(Kind.SEND):
            if row.stage >= 0 and row.peer in stage_of:
                sizes[min(stage, stage_of[row.peer])].append(row.size_bytes)
    return tuple(round(median(sizes[stage] or [0])) for stage in range(max(0, len(trace.stages) - 1)))


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
