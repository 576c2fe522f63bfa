"""Folded replays say what unfolded ones do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import (
    ALGORITHMS,
    DIRECT,
    HALVING_DOUBLING,
    HIERARCHICAL,
    KINDS,
    TREE,
    program_of,
)
from headway.collectives.hierarchical import Hosts
from headway.replayer.replayer import Replayer
from headway.scheduling.buckets import GatherMode
from headway.simulator.simulate import period_of
from headway.simulator.what_if import WhatIf
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy

STRATEGIES: list[Strategy] = [
    DistributedDataParallelStrategy(bucket_cap_mb=0.3),
    DecoupledStrategy(bucket_cap_bytes=2**19, gather="gradients"),
    DecoupledStrategy(bucket_cap_bytes=2**19, gather="parameters", channels=2),
]


def hosts(*shapes: tuple[int, float]) -> Cluster:
    return Cluster(
        hosts=tuple(
            Host(name=f"host{number}", workers=workers, up_gbps=gbps, down_gbps=gbps)
            for number, (workers, gbps) in enumerate(shapes)
        )
    )


@pytest.mark.parametrize(
    ("cluster", "timelines", "period"),
    [
        (hosts(*[(1, 1.0)] * 8), 1, 1),
        (hosts(*[(1, 1.0)] * 8), 2, 2),
        (hosts(*[(1, 1.0)] * 8), 3, 8),
        (hosts(*[(4, 1.0)] * 8), 2, 4),
        (hosts(*[(2, 1.0)] * 6), 4, 4),
        (hosts(*[(2, 1.0), (1, 1.0)] * 4), 1, 3),
        (hosts(*[(2, 1.0), (2, 2.0)] * 4), 2, 4),
        (hosts(*[(1, 1.0)] * 7, (1, 0.5)), 1, 8),
        (hosts((8, 1.0)), 2, 2),
    ],
)
def test_everything_repeats_after_as_many_ranks(cluster: Cluster, timelines: int, period: int) -> None:
    assert period_of(cluster, timelines) == period


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [(name, kind) for name, each in ALGORITHMS.items() for kind in KINDS if kind in each.kinds],
)
def test_programs_that_repeat_can_be_folded(algorithm: str, kind: str) -> None:
    """Whatever is folded repeats after whole hosts."""
    hosts = Hosts.of_places("aabb")
    program = program_of(algorithm, kind, hosts=hosts)(0, 4)
    if ALGORITHMS[algorithm].repeats:
        assert program.mirrors or program.rotation == (2 if algorithm == HIERARCHICAL else 1)
    else:
        assert not program.mirrors
        assert not program.rotation


@settings(deadline=None, max_examples=examples(25))
@given(
    workers=st.sampled_from([2, 4, 6, 8, 12, 16]),
    a_host=st.sampled_from([1, 2]),
    strategy=st.sampled_from(STRATEGIES),
    slow_ms=st.sampled_from([0.0, 8.0]),
    gbps=st.sampled_from([0.3, 1.0, 20.0]),
)
def test_folding_changes_nothing(
    workers: int, a_host: int, strategy: Strategy, slow_ms: float, gbps: float
) -> None:
    one = job(steps=2, gbps=gbps, slow={(1, "backward"): slow_ms})
    cluster = cluster_of(one).model_copy(update={"latency_us": 40.0})
    if a_host == 2:
        cluster = Cluster(hosts=(cluster.hosts[0].model_copy(update={"workers": 2}),), latency_us=40.0)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster)
    asked = WhatIf(workers=workers)
    folded, unfolded = (replayer.replay(strategy, asked, fold=fold) for fold in (True, False))
    # Two recorded ranks, each drawn from both steps on.
    assert folded.graph.ranks == (workers if workers % 4 else 4)
    assert unfolded.graph.ranks == workers
    assert folded.operations == pytest.approx(unfolded.operations * folded.graph.ranks / workers)
    assert folded.step_times_ms == pytest.approx(unfolded.step_times_ms, rel=1e-4)


@pytest.mark.parametrize("a_host", [1, 2])
@pytest.mark.parametrize("form", ["gradients", "parameters"])
@pytest.mark.parametrize("algorithm", [HIERARCHICAL, DIRECT, HALVING_DOUBLING])
def test_folding_changes_nothing_of_other_algorithms(algorithm: str, a_host: int, form: GatherMode) -> None:
    one = job(steps=1, gbps=0.3)
    cluster = hosts(*[(a_host, 0.3)] * (2 // a_host)).model_copy(update={"latency_us": 40.0})
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster)
    strategy = DecoupledStrategy(
        bucket_cap_bytes=2**19, gather=form, reduce_scatter=algorithm, all_gather=algorithm
    )
    asked = WhatIf(workers=16)
    folded, unfolded = (replayer.replay(strategy, asked, fold=fold) for fold in (True, False))
    assert folded.graph.ranks < unfolded.graph.ranks == 16
    assert folded.step_times_ms == pytest.approx(unfolded.step_times_ms, rel=1e-4)


def test_ranks_of_trees_are_not_alike_and_all_are_played() -> None:
    replayer = Replayer(as_bucketed(synthetic_trace(job(steps=1))))
    strategy = DecoupledStrategy(bucket_cap_bytes=2**19, all_gather=TREE)
    assert replayer.replay(strategy, WhatIf(workers=12)).graph.ranks == 12
    assert replayer.replay(what_if=WhatIf(workers=12)).graph.ranks < 12


def test_thousands_of_workers_are_replayed() -> None:
    one = job()
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    small, large = (replayer.replay(what_if=WhatIf(workers=workers)) for workers in (64, 4096))
    assert large.step_ms >= small.step_ms
    assert large.graph.world_size == 4096
