"""Groups with known truth: who waited for whom, how models mix, and how it is stored, said and drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.synthetic import trace_of

from headway.cli.main import run
from headway.diagnosis import diagnose
from headway.diagnosis.averaging import find_averaging
from headway.errors import TraceError
from headway.recording.averaging import realigned
from headway.replayer.replayer import Replayer
from headway.report.groups_picture import MARGIN, WIDTH, groups_picture
from headway.report.page import render_html
from headway.trace.events import Event, Kind, Stream
from headway.trace.folder import load_trace, write_trace
from headway.trace.format import AveragingRound, ClockFit, RankRounds, Trace

MS = 1_000_000
STEP_MS = 20
STEPS = 4
SVG = re.compile(r"<svg id=\"(groups|distances)\".*?</svg>", re.DOTALL)


def round_of(
    step: int, members: Sequence[int], asked_ms: float, begun_ms: float, ended_ms: float, **options: object
) -> AveragingRound:
    asked_ns, begun_ns, ended_ns = (
        round((step * STEP_MS + each) * MS) for each in (asked_ms, begun_ms, ended_ms)
    )
    return AveragingRound.model_validate(
        {
            "step": step, "iteration": step + 1, "ending": "committed", "number": 10 * step + min(members),
            "members": list(members), "iterations": [step + 1 + 2 * (rank == 3) for rank in members],
            "asked_ns": asked_ns, "begun_ns": begun_ns, "ended_ns": ended_ns, "told_ns": ended_ns,
            "blocked_ns": ended_ns - asked_ns, "relative_distance": 0.1 / (step + 1), **options,
        }
    )  # fmt: skip


def a_trace() -> Trace:
    """Pairs that change with every step, of which rank 3's wait 6 ms for it; the last one fails on both sides."""
    pairs = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1), (2, 3))]
    rounds: dict[int, list[AveragingRound]] = {rank: [] for rank in range(4)}
    rows: dict[int, list[Event]] = {rank: [] for rank in range(4)}
    for step, groups in enumerate(pairs):
        for group in groups:
            begun_ms = 16.0 if 3 in group else 10.0
            fails = {"ending": "aborted", "reason": "lost"} if step == STEPS - 1 and 3 in group else {}
            for rank in group:
                asked_ms = 16.0 if rank == 3 else 10.0
                rounds[rank].append(round_of(step, group, asked_ms, begun_ms, begun_ms + 2.0, **fails))
                at_ns, asked_ns = step * STEP_MS * MS, rounds[rank][-1].asked_ns
                rows[rank] += [
                    Event(Kind.STEP, "", Stream.COMPUTE, step, at_ns, STEP_MS * MS),
                    Event(Kind.FORWARD_PASS, "", Stream.COMPUTE, step, at_ns, asked_ns - at_ns),
                    Event(Kind.WAIT, "group", Stream.COMPUTE, step, asked_ns, rounds[rank][-1].blocked_ns),
                ]
    trace = trace_of(rows)
    return replace(
        trace, rounds={rank: RankRounds(worker=rank, rounds=tuple(own)) for rank, own in rounds.items()}
    )


def test_who_waits_for_whom_and_how_models_mix() -> None:
    found = find_averaging(a_trace())
    assert found is not None
    assert found.sizes == {2: 8}
    assert found.failed == 1
    assert found.standing_ms == {0: 3.5, 1: 3.5, 2: 5.0, 3: 2.0}
    assert {group.last for group in found.groups if 3 in group.members} == {3}
    assert found.waited_for_ms[3] == pytest.approx(4 * 6 / 4 / 4)
    assert next(iter(found.hosts_waited_for_ms)) == "host3"
    assert found.iterations_apart == (1.0, 2)
    assert found.mixing_iterations is not None
    assert 2.0 <= found.mixing_iterations < 3.5, "two dimensions of a square, from any beginning"
    assert [distance for _, distance in found.distances] == pytest.approx(
        [0.1, 0.1, 0.05, 0.05, 0.1 / 3, 0.1 / 3, 0.025]
    )
    said = diagnose(a_trace())
    assert said.averaging == found
    (finding,) = (each for each in said.findings if each.cause == "groups")
    assert finding.ranks == (3,)
    assert "on host3" in finding.sentence
    assert not {"communication", "moving_imbalance"} & {each.cause for each in said.findings}
    document = said.to_document()["averaging"]
    assert document["group_sizes"] == {"2": 8}
    assert document["staleness"] == {"0": 14}
    assert "averaging" not in diagnose(replace(a_trace(), rounds={})).to_document()


def test_rounds_are_kept_and_traces_without_them_still_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = a_trace()
    for name, rounds in (("with", trace.rounds), ("without", {})):
        (tmp_path / name).mkdir()
        write_trace(tmp_path / name, trace.manifest, trace.model, trace.events, rounds=rounds)
        assert load_trace(tmp_path / name).rounds == rounds
    assert run(["diagnose", str(tmp_path / "with")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Change to the training: every rank trains a model of its own" in out
    assert "8 of 2, of which 1 failed" in out
    with pytest.raises(TraceError, match="average models in groups"):
        Replayer(trace)


def test_rounds_move_with_their_clock() -> None:
    own = a_trace().rounds[2]
    moved = realigned(own, ClockFit(offset_ns=5e6))
    assert [each.asked_ns - 5 * MS for each in moved.rounds] == [each.asked_ns for each in own.rounds]
    assert [each.told_ns - 5 * MS for each in moved.rounds] == [each.told_ns for each in own.rounds]


def test_groups_are_drawn_at_their_times_in_one_colour_a_group() -> None:
    trace = a_trace()
    picture = groups_picture(find_averaging(trace))
    assert picture is not None
    groups = [block for block in picture.blocks if block.title.startswith("group")]
    waits = [block for block in picture.blocks if "waits" in block.title]
    assert len(groups) == 16
    assert len(waits) == 4
    first = [block for block in groups if block.title.startswith("group 2 ")]
    assert len(first) == 2
    assert len({(block.colour, round(block.x, 6), round(block.width, 6)) for block in first}) == 1
    unit = (WIDTH - MARGIN) / (STEPS * STEP_MS - 12)  # from the first question to the last end
    assert first[0].x == pytest.approx(MARGIN + 6 * unit)
    assert first[0].width == pytest.approx(2 * unit)
    assert groups_picture(None) is None
    page = render_html(trace, diagnose(trace))
    drawn = {found.group(1): ElementTree.fromstring(found.group(0)) for found in SVG.finditer(page)}
    assert set(drawn) == {"groups", "distances"}
    assert "instead of all-reducing gradients" in page
