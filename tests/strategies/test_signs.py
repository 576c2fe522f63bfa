"""Each choice of a plan has a job in which replay says that it helps and one in which it says that it hurts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.planning.jobs import layered_job

from headway.cluster import AlgorithmCost, PassSlowdown, SlowPath
from headway.collectives.algorithms import HALVING_DOUBLING, HIERARCHICAL, TREE
from headway.job import Job
from headway.simulator.simulate import simulate
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy

KIB, MIB = 2**10, 2**20
Chooses = Callable[[Job], Strategy]


def job(*sizes_bytes: int, on: dict[str, Any] | None = None, **of_job: Any) -> Job:
    """Layers of these sizes; ``on`` changes what the cluster is like."""
    made = layered_job(list(sizes_bytes), **of_job).job
    assert made.cluster is not None
    return replace(made, cluster=made.cluster.model_copy(update=on or {}))


def ddp(cap_mb: float = 1.0) -> Chooses:
    return lambda _job: DistributedDataParallelStrategy(bucket_cap_mb=cap_mb)


def capped(*caps_mb: float) -> Chooses:
    return lambda _job: DistributedDataParallelStrategy(bucket_caps_mb=caps_mb)


def decoupled(cap_bytes: int = MIB, **given: Any) -> Chooses:
    return lambda on: DecoupledStrategy(bucket_cap_bytes=cap_bytes, **given).spelled_out(on)


def servers(cap_mb: float = 1.0) -> Chooses:
    return lambda _job: ParameterServerStrategy(bucket_cap_mb=cap_mb)


def slow_way(one: int, other: int) -> dict[str, Any]:
    """A way between two hosts of a fifth of what their links carry."""
    pair = (f"host{one}", f"host{other}")
    return {"paths": tuple(SlowPath(source=a, target=b, gbps=0.05) for a, b in (pair, pair[::-1]))}


def slow_within_hosts(one: Job) -> Job:
    """The same where bytes take as long within a host as between hosts."""
    return replace(one, cluster=one.on.model_copy(update={"local_gbps": one.on.hosts[0].up_gbps}))


def halves(algorithm: str) -> dict[str, Any]:
    return {"reduce_scatter": algorithm, "all_gather": algorithm}


@dataclass(frozen=True)
class Choice:
    """What is chosen instead of ``plain``, and a job for each sign."""

    plain: Chooses
    chosen: Chooses
    helps: Job
    hurts: Job


BALANCED = job(*[MIB] * 8)
LONG_CALLS = {"algorithms": {"gloo_all_reduce": AlgorithmCost(overhead_us=5000)}}
LONG_UPDATES = {
    "algorithms": {
        "background_update": AlgorithmCost(overhead_us=5000), "deferred_update": AlgorithmCost(overhead_us=100),
    }
}  # fmt: skip
CHOICES = {
    "decoupled for DDP": Choice(
        ddp(), decoupled(), BALANCED,
        job(*[MIB] * 8, communication=0.3, on={"decoupled_slowdown": PassSlowdown(forward=0.5, backward=0.25)}),
    ),
    "servers for DDP": Choice(
        ddp(), servers(), job(*[8 * KIB] * 4, world_size=8, communication=0.01, latency_us=500.0),
        job(*[MIB] * 8, world_size=16, workers_a_host=4),
    ),
    "small buckets of DDP": Choice(
        ddp(25.0), ddp(0.06), BALANCED, job(*[64 * KIB] * 40, communication=0.02, on=LONG_CALLS)
    ),
    "caps of DDP's buckets": Choice(
        ddp(25.0), capped(4.0, 0.06), BALANCED, job(*[256 * KIB] * 40, communication=0.02, on=LONG_CALLS)
    ),
    "small buckets": Choice(
        decoupled(16 * MIB), decoupled(32 * KIB), BALANCED,
        job(*[16 * KIB] * 60, communication=0.02, overhead_us=3000.0),
    ),
    "several channels": Choice(
        decoupled(channels=1), decoupled(channels=4), job(*[2 * MIB] * 4, communication=0.3, latency_us=5000.0),
        job(*[MIB] * 8, communication=0.5, latency_us=0.0, overhead_us=0.0),
    ),
    "gathering gradients": Choice(
        decoupled(64 * KIB, gather="parameters"), decoupled(64 * KIB, gather="gradients"),
        job(*[64 * KIB] * 40, communication=2.0, on=LONG_UPDATES),
        job(*[MIB] * 8, communication=0.1, optimizer_ms=40.0),
    ),
    "trees": Choice(
        decoupled(), decoupled(**halves(TREE)),
        job(*[16 * KIB] * 4, world_size=6, communication=0.01, latency_us=1000.0),
        job(*[MIB] * 8, world_size=6, workers_a_host=2),
    ),
    "halving and doubling": Choice(
        decoupled(), decoupled(**halves(HALVING_DOUBLING)),
        job(*[16 * KIB] * 4, world_size=8, communication=0.01, latency_us=1000.0),
        job(*[MIB] * 8, world_size=8, workers_a_host=4),
    ),
    "hierarchical": Choice(
        decoupled(), decoupled(**halves(HIERARCHICAL)), job(*[MIB] * 8, world_size=16, workers_a_host=4),
        slow_within_hosts(job(*[MIB] * 8, world_size=8, workers_a_host=4)),
    ),
    "an order of rings": Choice(
        decoupled(), decoupled(ring_order=(0, 2, 1, 3)), job(*[MIB] * 8, on=slow_way(0, 1)),
        job(*[MIB] * 8, on=slow_way(0, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_it_helps_in_one_job_and_hurts_in_another(name: str) -> None:
    choice = CHOICES[name]
    for on, expected in ((choice.helps, "helps"), (choice.hurts, "hurts")):
        plain, chosen = (simulate(on, decide(on)).step_ms for decide in (choice.plain, choice.chosen))
        if expected == "helps":
            assert chosen < 0.98 * plain
        else:
            assert chosen > 1.02 * plain
