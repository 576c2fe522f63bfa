"""Physical bounds of a data-parallel step, so that a prediction means something.

With forward ``f``, backward ``b``, everything else ``r`` and one-way volume time
``c = N · (P - 1) / P / goodput`` (Patarasuk and Yuan, 2009), an all-reduce under backward cannot beat
``r + f + max(b, 2c)``. ``dependency_bound`` has the bounds that hold for every schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.cluster import Cluster
from headway.graph.timeline import Part, Timeline


@dataclass(frozen=True, slots=True)
class StepBound:
    """What a step is made of, in ms: forward, backward, one way of communication, everything else."""

    forward_ms: float
    backward_ms: float
    one_way_ms: float
    rest_ms: float

    @property
    def all_reduce_ms(self) -> float:
        """No overlap of an all-reduce with backward can be faster."""
        return self.rest_ms + self.forward_ms + max(self.backward_ms, 2 * self.one_way_ms)


def step_bound(timelines: Mapping[int, Sequence[Timeline]], size_bytes: int, cluster: Cluster) -> StepBound:
    """The bound of a recorded step on ``cluster``, from the slowest rank's mean parts."""
    parts = {rank: _mean_parts_ms(steps) for rank, steps in timelines.items()}
    slowest = max(parts.values(), key=lambda each: sum(each.values()))
    world_size = cluster.world_size
    gbps = min(min(host.up_gbps, host.down_gbps) for host in cluster.hosts)
    if len(cluster.hosts) == 1:
        gbps = cluster.local_gbps
    one_way_ms = size_bytes * 8 * (world_size - 1) / world_size / gbps / 1e6
    rest = (Part.INPUT, Part.OPTIMIZER, Part.REST)
    return StepBound(
        forward_ms=slowest[Part.FORWARD],
        backward_ms=slowest[Part.BACKWARD],
        one_way_ms=one_way_ms,
        rest_ms=sum(slowest[part] for part in rest),
    )


def _mean_parts_ms(steps: Sequence[Timeline]) -> dict[str, float]:
    return {
        part: float(np.mean([sum(i.duration_ns for i in step.items if i.kind == part) for step in steps]))
        / 1e6
        for part in (Part.INPUT, Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.REST)
    }
