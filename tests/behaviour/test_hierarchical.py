"""Training under plans with hierarchical collectives: stock DDP's numbers, whatever ranks share a host."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers
from tests.behaviour.parameter_server_cases import alone

from headway.collectives.algorithms import HIERARCHICAL
from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace

CASES = "tests.behaviour.hierarchical_cases"

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("places", ["aabb", "abab", "aaa", "ab"])
def test_same_numbers_as_ddp_and_as_one_process(places: str) -> None:
    expected = alone(len(places), 1)
    for result in workers.run(len(places), f"{CASES}:trains", places, timeout_s=110):
        assert len(result) == 5
        for trained in result.values():
            for got, wanted in zip(trained, expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_hosts_with_different_numbers_of_workers_are_refused_on_every_rank() -> None:
    for reason in workers.run(3, f"{CASES}:is_refused", "aab"):
        assert "same number of workers" in reason
        assert "1, 2 workers" in reason


def test_a_recording_says_the_algorithm_and_replays(tmp_path: Path) -> None:
    workers.run(4, f"{CASES}:recorded", "aabb", str(tmp_path), timeout_s=110)
    trace = load_trace(tmp_path / "trace")
    assert (trace.events[0].algorithm == HIERARCHICAL).any()
    replayer = Replayer(trace)
    assert [host.workers for host in replayer.cluster.hosts] == [2, 2]
    algorithms = {c.selection.algorithm for c in replayer.replay().graph.collectives if c.bucket >= 0}
    assert algorithms == {HIERARCHICAL}
