"""Synthetic jobs for the planner, and what full replay says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.graph.build import GraphBuilder
from headway.graph.computation import Computation
from headway.graph.disturbance import play_disturbed
from headway.graph.step_layout import lay_out_ranks
from headway.graph.step_profile import LayerTimes, StepProfile
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.scheduling.buckets import BucketSchedule
from headway.simulation.engine import PlayedTimes
from headway.strategies.decoupled.reactions import Reactions

MS = 1_000_000


@dataclass(frozen=True)
class PlannedJob:
    """A model, the profile of its step, and a cluster."""

    model: ModelSpec
    profile: StepProfile
    cluster: Cluster

    @property
    def job(self) -> Job:
        steps = Computation({0: (self.profile.timeline(),)})
        return Job((self.model,), self.cluster.world_size, self.cluster, steps)


def layered_job(
    sizes_bytes: list[int],
    *,
    forward_ms: float = 30.0,
    communication: float = 1.0,
    world_size: int = 4,
    workers_a_host: int = 1,
    latency_us: float = 20.0,
    overhead_us: float = 100.0,
    optimizer_ms: float = 4.0,
    rest_ms: float = 1.0,
    seed: int = 0,
) -> PlannedJob:
    """A model with one layer for each of ``sizes_bytes``, each a weight and a small bias; backward takes twice forward.

    ``communication`` is the time of one way of all bytes, in units of the backward.
    """
    random = np.random.default_rng(seed)
    shares = random.uniform(0.5, 1.5, len(sizes_bytes))
    times_ns = shares / shares.sum() * forward_ms * MS
    names = [f"layer{index}" for index in range(len(sizes_bytes))]
    parameters = tuple(
        ParameterSpec(name=f"{name}.{kind}", shape=(max(1, numel),), dtype="float32", module=name)
        for name, size in zip(names, sizes_bytes, strict=True)
        for kind, numel in (("weight", size // 4), ("bias", 16))
    )
    layers = [
        LayerTimes(name, (f"{name}.weight", f"{name}.bias"), round(time_ns), round(2 * time_ns))
        for name, time_ns in zip(names, times_ns, strict=True)
    ]
    profile = profile_of_layers(
        layers, tail_ns=round(0.3 * MS), rest_ns=round(rest_ms * MS), optimizer_ns=round(optimizer_ms * MS)
    )
    model = ModelSpec(parameters=parameters, forward_order=tuple(names), ready_order=tuple(profile.ready_ns))
    one_way = model.size_bytes * (world_size - 1) / world_size
    gbps = one_way * 8 / (communication * 2 * forward_ms * MS)
    cluster = cluster_of(world_size, gbps, workers_a_host, latency_us, overhead_us)
    return PlannedJob(model, profile, cluster)


def profile_of_layers(
    layers: Sequence[LayerTimes],
    *,
    tail_ns: int = 0,
    rest_ns: int = 0,
    optimizer_ns: int = 0,
) -> StepProfile:
    """The profile of ``layers`` that run one after the other, in the order of forward.

    Backward runs them in reverse and readies a layer's gradients at its end, the last parameter first. A parameter
    that several layers name is ready when the last of them is done.
    """
    needs_ns: dict[str, int] = {}
    ready_ns: dict[str, int] = {}
    forward_ns = backward_ns = 0
    for layer in layers:
        needs_ns.setdefault(layer.module, forward_ns)
        forward_ns += layer.forward_ns
    for layer in reversed(layers):
        backward_ns += layer.backward_ns
        for parameter in reversed(layer.parameters):
            ready_ns.pop(parameter, None)
            ready_ns[parameter] = backward_ns
    return StepProfile(forward_ns, backward_ns, needs_ns, ready_ns, 0, tail_ns, rest_ns, optimizer_ns)


def cluster_of(
    world_size: int, gbps: float, workers_a_host: int, latency_us: float, overhead_us: float
) -> Cluster:
    hosts = tuple(
        Host(name=f"host{index}", workers=workers_a_host, up_gbps=gbps, down_gbps=gbps)
        for index in range(world_size // workers_a_host)
    )
    algorithms = {
        "ring": AlgorithmCost(overhead_us=overhead_us),
        "deferred_update": AlgorithmCost(overhead_us=overhead_us / 2),
        "step_call": AlgorithmCost(overhead_us=overhead_us),
    }
    return Cluster(
        hosts=hosts, latency_us=latency_us, local_gbps=8 * gbps, local_latency_us=5.0, algorithms=algorithms
    )


def replayed_ns(job: PlannedJob, schedule: BucketSchedule, steps: int = 4) -> float:
    """What the full engine says: the last of ``steps`` steps, over all ranks, at the cluster's slowdown."""
    graph, played = replayed(job, schedule, steps)
    ends = [played.end_ns[graph.boundaries[step]].mean() for step in range(steps)]
    return float(ends[-1] - ends[-2])


def replayed(
    job: PlannedJob, schedule: BucketSchedule, steps: int = 4
) -> tuple[GraphBuilder[Any], PlayedTimes]:
    """So many steps of every rank, and when what they do ran."""
    graph = GraphBuilder(job.cluster, schedule)
    ranks = [
        [job.profile.timeline(rank, step) for step in range(steps)] for rank in range(job.cluster.world_size)
    ]
    lay_out_ranks(graph, Reactions(graph, Job.of(job.model)), ranks)
    return graph, play_disturbed(graph, graph.close(), job.cluster.compute_slowdown)


class Alone:
    """The ranks of a job of one, which asks nobody."""

    rank = 0

    def number_from_rank_0(self, value: float) -> float:
        return value

    def text_from_rank_0(self, text: str) -> str:
        assert text
        return text
