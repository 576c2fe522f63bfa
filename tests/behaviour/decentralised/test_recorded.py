"""A job whose ranks average in groups, recorded: what the runtime said of its rounds is what the trace holds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests import workers
from tests.behaviour.decentralised.recorded_cases import FIRST, STOP
from tests.behaviour.decentralised.test_partial_all_reduce import coordinator

from headway.cli.main import run
from headway.diagnosis import diagnose
from headway.trace.events import GROUP, Kind
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_rounds_are_recorded_diagnosed_and_drawn(
    staleness: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    with coordinator(4, (2, 3), seed=staleness) as server:
        told = workers.run(
            4, "tests.behaviour.decentralised.recorded_cases:recorded", str(folder), server.port, staleness
        )
    trace = load_trace(folder)
    assert sorted(trace.rounds) == [0, 1, 2, 3]
    for rank, own in trace.rounds.items():
        assert own.worker == rank
        assert own.rounds
        by_iteration = {(each["iteration"], each["ending"]): each for each in told[rank]}
        for each in own.rounds:
            said = by_iteration[each.iteration, each.ending]
            assert list(each.members) == list(said["members"])
            assert each.distance == pytest.approx(said["distance"])
            assert FIRST <= each.step < STOP
            assert each.asked_ns <= each.begun_ns <= each.ended_ns
        waits = trace.events[rank].of_kind(Kind.WAIT)
        assert GROUP in waits.name
        assert trace.manifest.ranks[rank].strategy == {
            "partial-all-reduce": {"staleness": staleness, "moments": "local"}
        }
    found = diagnose(trace)
    averaging = found.averaging
    assert averaging is not None
    members = Counter(rank for group in averaging.groups for rank in group.asked_ns)
    recorded = {rank: sum(len(each.members) > 1 for each in own.rounds) for rank, own in trace.rounds.items()}
    assert members == recorded
    assert set(averaging.sizes) <= {2, 3}
    assert averaging.failed == 0
    assert all(value > 0 for value in averaging.standing_ms.values())
    assert ("late" in averaging.changes_training) == bool(staleness)
    assert "groups" in {each.cause for each in found.findings}
    assert run(["diagnose", str(folder), "--html", str(tmp_path / "page.html"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["averaging"]["groups"] == len(averaging.groups)
    page = (tmp_path / "page.html").read_text()
    assert '<svg id="groups"' in page
    assert '<svg id="distances"' in page
    assert "every rank trains a model of its own" in page
    assert run(["diagnose", str(folder)]) == 0
    assert "Change to the training" in capsys.readouterr().out
    for command in ("replay", "optimize"):
        assert run([command, str(folder)]) == 2
        assert "average models in groups" in capsys.readouterr().err
