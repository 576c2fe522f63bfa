"""A window of a simulation: from when to when, and by which seed."""

from __future__ import annotations

import pytest
from tests.strategies.partial_all_reduce.test_host_steps import cluster, job

from headway.strategies.horizon import Outcome
from headway.strategies.partial_all_reduce.horizon import JITTER, Window, jitter_of, over_a_horizon
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

STRATEGIES = [
    PartialAllReduceStrategy(groups="first-come", group_size=2),
    PartialAllReduceStrategy(groups="static", staleness=1, group_size=2, within_hosts="all-reduce"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["ranks", "hosts"])
def test_it_is_what_is_simulated(strategy: PartialAllReduceStrategy) -> None:
    of = job(cluster(2, 2), r1=3.0)

    def seen(from_ns: int, until_ns: int, seed: int = 0) -> Outcome:
        return over_a_horizon(of, strategy, Window(from_ns, until_ns, seed))

    found = seen(20_000_000, 100_000_000)
    assert (found.from_ns, found.until_ns) == (20_000_000, 100_000_000)
    assert found.finished_ns == seen(0, 100_000_000).finished_ns, (
        "its beginning changes what is counted alone"
    )
    longer = seen(20_000_000, 200_000_000)
    for own, longer_own in zip(found.finished_ns, longer.finished_ns, strict=True):
        assert list(own) == list(longer_own)[: len(own)]
    assert found.finished_ns != seen(20_000_000, 100_000_000, seed=1).finished_ns


@pytest.mark.parametrize(
    ("steps_ms", "expected"),
    [
        ([[100.0]], JITTER),
        ([[100.0, 100.4, 99.6]], JITTER),
        ([[100.0, 100.2, 99.8, 100.4, 99.6]], 0.004),
        ([[100.0, 100.2, 99.8, 100.4, 99.6], [50.0]], 0.004),
        ([[100.0, 130.0, 70.0, 160.0]], JITTER),
        ([[100.0, 100.0, 100.0, 400.0]], 0.0),
    ],
)
def test_chance_is_as_steps_show_it(steps_ms: list[list[float]], expected: float) -> None:
    steps = [[(("forward", round(each * 1e6)),) for each in own] for own in steps_ms]
    assert jitter_of(steps) == pytest.approx(expected)
