"""The co-simulation takes the times, and forms the groups, of a plain event loop."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.graph.event_loop import Workers
from tests.scheduling.group_schedules import pairs_in_turn
from tests.strategies.partial_all_reduce import plain_loop

from headway.cluster import Cluster, Host
from headway.collectives.algorithms import ALL_REDUCE, RING
from headway.collectives.selection import Selection
from headway.errors import UnsupportedError
from headway.graph.build import GraphBuilder, RankCursor
from headway.scheduling.groups import CoordinatedGroups
from headway.simulation.engine import play
from headway.strategies.horizon import Outcome
from headway.strategies.partial_all_reduce.cosimulation import CoSimulation, Iterations, Scenario
from headway.strategies.partial_all_reduce.generators.rules import generator_of
from headway.strategies.partial_all_reduce.matrices import Consensus

SIZE_BYTES = 1_000_000
GENERATORS: list[tuple[str, dict[str, Any]]] = [
    ("all", {}),
    ("pairs", {}),
    ("random", {"group_size": 3}),
    ("group-buffer", {"group_size": 3, "slowdown_threshold": 3}),
    ("global-division", {"group_size": 2}),
    ("inter-intra", {"group_size": 2}),
    ("first-come", {"group_size": 3}),
    ("first-come", {"group_size": 2, "deadline_ms": 0.4, "mixing_window": 2}),
]


def cluster_of(ranks: int, latency_us: float = 50.0) -> Cluster:
    hosts = tuple(Host(name=f"host{rank}", workers=1, up_gbps=10, down_gbps=10) for rank in range(ranks))
    return Cluster(hosts=hosts, latency_us=latency_us)


@cache
def average_ns(members: int) -> int:
    """How long so many equal hosts all-reduce that begin together: by themselves, in a graph of their own."""
    graph = GraphBuilder(cluster_of(members), pairs_in_turn(members))
    for rank in range(members):
        selection = graph.selection_of(ALL_REDUCE, SIZE_BYTES)
        graph.launch(RankCursor(rank), ALL_REDUCE, 0, SIZE_BYTES, bucket=-1, selection=selection)
    operations = graph.close()
    (collective,) = graph.collectives
    return int(play(operations).end_ns[collective.ends].max())


def simulated(
    name: str, options: dict[str, Any], iterations: Iterations, staleness: int, latency_us: float = 50.0
) -> Outcome:
    cluster = cluster_of(len(iterations.steps), latency_us)
    schedule = CoordinatedGroups(cluster.world_size, name, tuple(sorted(options.items())), staleness, 3)
    return CoSimulation(cluster, schedule, iterations, SIZE_BYTES, staleness).play()


def looped(
    name: str, options: dict[str, Any], iterations: Iterations, staleness: int, latency_us: float = 50.0
) -> plain_loop.Job:
    ranks, scenario = len(iterations.steps), iterations.scenario
    job = plain_loop.Job(
        ranks,
        scenario.until_ns,
        generator_of(name, options, {rank: f"host{rank}" for rank in range(ranks)}, 3),
        lambda rank, iteration: sum(time_ns for _, time_ns in iterations.of(rank, iteration)),
        lambda members: average_ns(len(members)),
        round(latency_us * 1e3),
        staleness,
        scenario.deaths,
        scenario.joins,
        frozenset(rank for rank in range(ranks) if scenario.absent_first(rank)),
    )
    job.run()
    return job


@st.composite
def drawn_iterations(draw: st.DrawFn) -> Iterations:
    """Ranks with steps of their own, some slower, some of which die, or join, or both."""
    ranks = draw(st.integers(2, 6))
    step_ns = st.integers(200_000, 3_000_000)
    steps = [
        [[("forward", each)] for each in draw(st.lists(step_ns, min_size=1, max_size=3))]
        for _ in range(ranks)
    ]
    until_ns = draw(st.integers(10, 60)) * 10**6
    deaths: list[tuple[int, int]] = []
    joins: list[tuple[int, int]] = []
    for rank in range(ranks):
        times = sorted(draw(st.sets(st.integers(1, until_ns), max_size=2)))
        first_joins = draw(st.booleans()) and rank > 0
        for number, time_ns in enumerate(times):
            (joins if (number % 2 == 0) == first_joins else deaths).append((time_ns, rank))
    factors = {0: float(draw(st.integers(1, 5)))}
    share = draw(st.sampled_from([0.0, 0.2]))
    scenario = Scenario(until_ns, deaths=deaths, joins=joins, slow_share=share, slow_factor=3.0, seed=5)
    return Iterations(steps, scenario, factors)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("name", "options"), GENERATORS)
@settings(deadline=None, max_examples=examples(12))
@given(iterations=drawn_iterations())
def test_a_plain_event_loop_takes_the_same_times(
    name: str, options: dict[str, Any], staleness: int, iterations: Iterations
) -> None:
    found = simulated(name, options, iterations, staleness)
    expected = looped(name, options, iterations, staleness)
    assert found.finished_ns == expected.finished
    assert [
        (run.number, run.members, run.begin_ns, run.end_ns, run.averaged) for run in found.groups
    ] == expected.groups


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_comes_back_while_its_former_group_runs_waits_for_its_end(staleness: int) -> None:
    scenario = Scenario(20 * 10**6, deaths=[(200_000, 0)], joins=[(210_000, 0)])
    iterations = Iterations([[[("forward", 100_000)]]] * 2, scenario)
    assert average_ns(2) > 300_000, "it has asked again before the group ends"
    found = simulated("all", {}, iterations, staleness)
    expected = looped("all", {}, iterations, staleness)
    assert found.finished_ns == expected.finished
    assert [run.averaged for run in found.groups[:3]] == [False, True, True]


def test_pairs_average_in_the_time_that_their_messages_take() -> None:
    workers = Workers(((10**6,),) * 2, (10.0, 5.0), (2.5, 10.0), 50_000, SIZE_BYTES)
    cluster = Cluster(
        hosts=tuple(
            Host(name=f"h{rank}", workers=1, up_gbps=up, down_gbps=down)
            for rank, (up, down) in enumerate(zip(workers.up_gbps, workers.down_gbps, strict=True))
        ),
        latency_us=50.0,
    )

    class Ring(CoSimulation):
        def selection(self, members: Any) -> Selection:
            return Selection(RING, ALL_REDUCE)

    iterations = Iterations([[[("forward", 10**6)]]] * 2, Scenario(20 * 10**6))
    outcome = Ring(cluster, CoordinatedGroups(2, "all"), iterations, SIZE_BYTES, 0).play()
    took_ns = 10**6 + 4 * 50_000 + workers.averaging_ns(0, 1)
    assert np.diff(outcome.finished_ns[0]).tolist() == [took_ns] * (len(outcome.finished_ns[0]) - 1)
    assert len(outcome.finished_ns[0]) == 1 + (20 * 10**6 - 1 - 10**6) // took_ns


def test_staleness_hides_averaging() -> None:
    step_ns = 3 * average_ns(4)
    steps = [[[("forward", step_ns)]]] * 4
    rates = []
    for staleness in (0, 1):
        iterations = Iterations(steps, Scenario(60 * step_ns, from_ns=10 * step_ns))
        outcome = simulated("all", {}, iterations, staleness)
        rates.append(outcome.total_per_s)
        assert outcome.iterations_apart == (0.0, 0)
        assert outcome.sizes.keys() == {4}
    assert rates[1] == pytest.approx(4e9 / step_ns, rel=0.03)
    assert rates[0] < 0.8 * rates[1]


def test_a_straggler_holds_all_up_under_all_reduce_only() -> None:
    steps = [[[("forward", 10**7)]]] * 6
    total = {}
    for name in ("all", "first-come"):
        iterations = Iterations(steps, Scenario(10**9, from_ns=10**8), {2: 8.0})
        outcome = simulated(name, {} if name == "all" else {"group_size": 2}, iterations, 0)
        total[name] = outcome.total_per_s
        assert sum(outcome.standing_ns) >= sum(outcome.forming_ns)
        document = outcome.to_document()
        assert document["iterations_per_s"] == pytest.approx(sum(document["rank_iterations_per_s"].values()))
    assert total["first-come"] > 4 * total["all"]


def test_groups_that_are_fixed_lose_nobody() -> None:
    scenario = Scenario(10**7, deaths=[(10**6, 1)])
    with pytest.raises(UnsupportedError, match="static groups"):
        CoSimulation(cluster_of(2), pairs_in_turn(2), Iterations([[[("x", 5)]]] * 2, scenario), 8, 0)


def test_fixed_groups_meet_in_their_rounds() -> None:
    scenario = Scenario(10**8)
    iterations = Iterations([[[("forward", 10**6 * (rank + 1))]] for rank in range(4)], scenario)
    schedule = pairs_in_turn(4)
    outcome = CoSimulation(cluster_of(4), schedule, iterations, SIZE_BYTES, 0).play()
    assert len(outcome.groups) > 10
    for run in outcome.groups:
        assert len(set(run.iterations)) == 1
        assert schedule.group_of(run.members[0], run.iterations[0] - 1) == run.members


def test_scenarios_that_cannot_be() -> None:
    for said, wrong in (
        ("expected 0 <= from_ns", {"until_ns": 5, "from_ns": 5}),
        ("after the start", {"until_ns": 5, "deaths": [(0, 1)]}),
        ("rank 1 dies or joins twice", {"until_ns": 5, "deaths": [(2, 1), (3, 1)]}),
    ):
        with pytest.raises(ValueError, match=said):
            Scenario(**wrong)


@settings(deadline=None, max_examples=examples(30))
@given(data=st.data())
def test_spread_is_that_of_sampled_updates(data: st.DataObject) -> None:
    """Its covariance against sampled noise that is averaged as models are, and the product against matrices."""
    ranks = data.draw(st.integers(2, 5))
    consensus, product = Consensus(ranks), np.eye(ranks)
    noise = np.random.default_rng(0)
    models = np.zeros((ranks, 20_000))
    for _ in range(data.draw(st.integers(0, 12))):
        rank = data.draw(st.integers(0, ranks - 1))
        members = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=2)))
        consensus.iterated(rank)
        models[rank] += noise.standard_normal(models.shape[1])
        consensus.averaged(members)
        matrix = np.eye(ranks)
        matrix[np.ix_(members, members)] = 1 / len(members)
        product, models = matrix @ product, matrix @ models
    assert np.allclose(consensus.weights, product)
    apart = product - product.mean(axis=0)
    assert consensus.distance(range(ranks)) == pytest.approx(np.linalg.norm(apart) / np.sqrt(ranks - 1))
    sampled = np.sqrt(((models - models.mean(axis=0)) ** 2).mean())
    assert consensus.spread(range(ranks)) == pytest.approx(sampled, rel=0.05, abs=1e-6)


def test_iterations_differ_by_chance_within_the_jitter_and_the_same_in_every_simulation() -> None:
    scenario = Scenario(10**9, jitter=0.02)
    factors = [scenario.factor(rank, iteration) for rank in range(8) for iteration in range(50)]
    assert 0.98 <= min(factors) < 0.985
    assert 1.015 < max(factors) <= 1.02
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.003)
    assert factors == [
        Scenario(10**9, jitter=0.02).factor(rank, iteration) for rank in range(8) for iteration in range(50)
    ]
    assert Scenario(10**9).factor(3, 7) == 1.0
