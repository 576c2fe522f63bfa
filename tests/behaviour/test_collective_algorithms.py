"""Training under plans with direct collectives, and with halving and doubling: stock DDP's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers
from tests.behaviour.hierarchical_cases import SMALL
from tests.behaviour.parameter_server_cases import alone

from headway.collectives.algorithms import DIRECT, HALVING_DOUBLING, HIERARCHICAL, RING, TREE
from headway.replayer.replayer import Replayer
from headway.trace.events import Kind
from headway.trace.folder import load_trace

CASES = "tests.behaviour.hierarchical_cases"

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("algorithm", "places"),
    [
        *((DIRECT, places) for places in ("aa", "abc", "aabb", "aabcc")),
        *((HALVING_DOUBLING, places) for places in ("aa", "aabc")),
        *((TREE, places) for places in ("abc", "aabbc")),
    ],
)
def test_same_numbers_as_ddp_and_as_one_process(algorithm: str, places: str) -> None:
    expected = alone(len(places), 1)
    for result in workers.run(len(places), f"{CASES}:trains", places, algorithm, timeout_s=110):
        assert len(result) == 5
        for trained in result.values():
            for got, wanted in zip(trained, expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_rings_in_another_order_train_the_same() -> None:
    expected = alone(4, 1)
    for result in workers.run(4, f"{CASES}:trains", "abcd", RING, (), (2, 0, 3, 1), timeout_s=110):
        for trained in result.values():
            for got, wanted in zip(trained, expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_an_order_of_other_ranks_is_refused() -> None:
    for said in workers.run(2, f"{CASES}:is_refused", "ab", RING, (0, 1, 2)):
        assert "ring_order does not contain every rank exactly once" in said


def test_halving_is_refused_on_every_rank_unless_they_are_a_power_of_two() -> None:
    for reason in workers.run(3, f"{CASES}:is_refused", "abc", HALVING_DOUBLING):
        assert "a power of two" in reason
        assert "3 workers" in reason


@pytest.mark.parametrize("algorithm", [DIRECT, HALVING_DOUBLING])
def test_a_recording_says_the_algorithm_and_replays(algorithm: str, tmp_path: Path) -> None:
    workers.run(4, f"{CASES}:recorded", "aabb", str(tmp_path), algorithm, timeout_s=110)
    trace = load_trace(tmp_path / "trace")
    assert (trace.events[0].algorithm == algorithm).any()
    graph = Replayer(trace).replay().graph
    assert {c.selection.algorithm for c in graph.collectives if c.bucket >= 0} == {algorithm}


def test_each_bucket_has_the_algorithm_of_its_size_live_and_in_replay(tmp_path: Path) -> None:
    expected = alone(4, 1)
    for result in workers.run(
        4, f"{CASES}:trains", "aabb", HIERARCHICAL, (SMALL.model_dump(),), timeout_s=110
    ):
        for trained in result.values():
            for got, wanted in zip(trained, expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    workers.run(
        4, f"{CASES}:recorded", "aabb", str(tmp_path), HIERARCHICAL, (SMALL.model_dump(),), timeout_s=110
    )
    trace = load_trace(tmp_path / "trace")
    rows = trace.events[0].of_kind(Kind.COLLECTIVE)
    live = {(row.bucket, row.size_bytes, row.name, row.algorithm) for row in rows if row.bucket >= 0}
    assert live == {
        (bucket, size_bytes, half, algorithm if size_bytes <= SMALL.size_bytes else HIERARCHICAL)
        for bucket, size_bytes, *_ in live
        for half, algorithm in (("reduce_scatter", DIRECT), ("all_gather", HALVING_DOUBLING))
    }
    assert {algorithm for *_, algorithm in live} == {DIRECT, HALVING_DOUBLING, HIERARCHICAL}
    replayed = Replayer(trace).replay().graph.collectives
    assert {(c.bucket, c.selection.kind, c.selection.algorithm) for c in replayed if c.bucket >= 0} == {
        (bucket, half, algorithm) for bucket, _, half, algorithm in live
    }
