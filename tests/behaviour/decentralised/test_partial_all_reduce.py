"""Workers that average in groups, as real processes: against one process that mixes, and where workers fail or come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour.decentralised import job
from tests.behaviour.decentralised.coordinating import Server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

CASES = "tests.behaviour.decentralised.cases"
STEPS = 12


@contextmanager
def coordinator(*args: Any, **kwargs: Any) -> Iterator[Server]:
    server = Server(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


def endings(result: Any) -> list[str]:
    return [each["ending"] for each in result["rounds"]]


@pytest.mark.parametrize(
    ("staleness", "moments", "buffers"),
    [
        (0, "local", "averaged"),
        pytest.param(0, "averaged", "local", marks=pytest.mark.exhaustive),
        pytest.param(1, "local", "averaged", marks=pytest.mark.exhaustive),
        (1, "averaged", "averaged"),
    ],
)
def test_random_groups_mix_as_their_matrices(staleness: int, moments: str, buffers: str) -> None:
    options = {"staleness": staleness, "moments": moments, "buffers": buffers}
    with coordinator(4, (2, 3), seed=staleness) as server:
        results = workers.run(4, f"{CASES}:trains", server.port, STEPS, options)
        committed = [metrics for _, metrics in server.reports if metrics["committed"]]
    rounds = [result["rounds"] for result in results]
    assert all({"aborted", "uncertain"}.isdisjoint(endings(result)) for result in results)
    assert sum(endings(result).count("committed") for result in results) > 3 * STEPS
    expected = job.reference(4, rounds, STEPS, moments=moments, buffers=buffers)
    for result, values in zip(results, expected, strict=True):
        assert result["values"] == pytest.approx(values, rel=1e-9, abs=1e-12)
        assert result["rooms"] == 0
        assert 0 < result["contexts"] <= 16
    # The last round of staleness 1 is taken by flush(), without a step in between.
    late = [each["staleness"] for own in rounds for each in own if each["ending"] == "committed"]
    assert set(late) <= {0, staleness}
    assert late.count(staleness) > len(late) // 2
    assert len(committed) == len(late)
    assert all(each["relative_consensus_distance"] > 0 and each["averaged_bytes"] > 0 for each in committed)


def test_a_group_of_all_has_the_mean_to_the_last_bit() -> None:
    with coordinator(4, (4,)) as server:
        results = workers.run(4, f"{CASES}:trains", server.port, 1, {})
    assert all(result["values"] == results[0]["values"] for result in results)
    alone = [job.Reference(worker, average_moments=False, average_buffers=True) for worker in range(4)]
    for each in alone:
        each.advance(1)
    mean = torch.tensor([job.values(each.module) for each in alone], dtype=torch.float64).mean(0)
    assert results[0]["values"] == pytest.approx(mean.tolist(), rel=1e-12, abs=1e-15)


def test_a_vote_whose_answer_is_lost_is_made_good_once() -> None:
    with coordinator(3, (3,), lose=(1, 4)) as server:
        results = workers.run(3, f"{CASES}:trains", server.port, STEPS, {})
    rounds = [result["rounds"] for result in results]
    lost = [each for each in rounds[1] if each["iteration"] == 4]
    assert [each["ending"] for each in lost] == ["uncertain", "committed"]
    assert lost[1]["staleness"] > 0
    assert "alone" in endings(results[1])
    expected = job.reference(3, rounds, STEPS, moments="local", buffers="averaged")
    for result, values in zip(results, expected, strict=True):
        assert result["values"] == pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("staleness", [0, 1])
def test_pairs_by_a_schedule_need_no_coordinator(staleness: int) -> None:
    results = workers.run(4, f"{CASES}:scheduled", 7, staleness)
    rounds = [result["rounds"] for result in results]
    assert all(set(endings(result)) == {"committed"} for result in results)
    expected = job.reference(4, rounds, 7, moments="local", buffers="averaged")
    for result, values in zip(results, expected, strict=True):
        assert result["values"] == pytest.approx(values, rel=1e-9, abs=1e-12)
        assert result["workers"] == [0, 1, 2, 3]
        assert result["final"] == results[0]["final"]
    mean = torch.tensor([result["values"] for result in results], dtype=torch.float64).mean(0)
    assert results[0]["final"] == pytest.approx(mean.tolist(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("kind", "staleness"),
    [("killed", 0), pytest.param("killed", 1, marks=pytest.mark.exhaustive), ("stopped", 0)],
)
def test_a_worker_that_fails_in_the_middle_leaves_the_others_whole(kind: str, staleness: int) -> None:
    with coordinator(4, (4,)) as server:
        ended = workers.launch(4, f"{CASES}:one_fails", server.port, kind, staleness, timeout_s=60)
    *others, culprit = ended
    assert all(worker.status == 0 for worker in others), "\n".join(worker.output for worker in ended)
    assert (culprit.status == 0) == (kind == "stopped"), culprit.output
    live = others if kind == "killed" else ended
    for worker in live:
        found = worker.result
        assert not any(found["torn"]), "parameters changed although no mean was taken"
        assert "aborted" in found["endings"]
        assert found["endings"].count("committed") >= 4
        assert found["workers"] == [each.rank for each in live]
        assert found["digest"] == live[0].result["digest"]


@pytest.mark.parametrize("known", [True, False])
def test_a_worker_that_comes_later_has_a_peers_state(known: bool) -> None:
    with coordinator(2, (2, 3)) as server:
        results = workers.run(3, f"{CASES}:one_joins", server.port, known)
    *peers, late = results
    assert late["joined_at"] >= 5
    if known:
        at = str(late["joined_at"])
        assert late["digests"][at][0] in [digest for peer in peers for digest in peer["digests"].get(at, [])]
    assert min(late["steps"]) > late["joined_at"]  # the peer's moments, or its count of steps would be less
    for each in results:
        assert each["workers"] == [0, 1, 2]
        assert each["values"] == results[0]["values"]


def test_a_worker_with_another_model_is_refused() -> None:
    with coordinator(1, (2,)) as server:
        _, refused = workers.run(2, f"{CASES}:another_model", server.port)
    assert "worker 0 trains a different model" in refused
