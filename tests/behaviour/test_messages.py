"""Messages of a script's own in a recording: who sent what to whom, and what was waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests import workers
from tests.behaviour.message_cases import LATE_S, NUMBERS, STEPS

import headway
from headway.cli.main import cli
from headway.trace.events import WORK, Event, Kind
from headway.trace.format import Trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("messages")
    ranks = workers.run(2, "tests.behaviour.message_cases:recorded", str(folder))
    return headway.load_trace(folder / "trace"), ranks


def messages(trace: Trace, rank: int, kind: str) -> list[Event]:
    return [row for row in trace.events[rank].of_kind(kind) if row.step == trace.steps[0]]


def test_messages_arrive_as_ever(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    for rank in done[1]:
        assert rank == {"received": [float(step) for step in range(STEPS)], "undone": True}


def test_each_send_has_its_receive(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace = done[0]
    for rank, other, sizes in ((0, 1, [4 * NUMBERS, 8, 8]), (1, 0, [8 * NUMBERS, 8])):
        sent, received = messages(trace, rank, Kind.SEND), messages(trace, other, Kind.RECEIVE)
        assert [row.size_bytes for row in sent] == sizes
        assert {row.peer for row in sent} == {other}
        assert {row.peer for row in received} == {rank}
        ends = [[(row.group, row.sequence, row.size_bytes) for row in rows] for rows in (sent, received)]
        assert sorted(ends[0]) == sorted(ends[1])
        assert all(row.duration_ns > 0 for row in (*sent, *received))


def test_groups_of_all_ranks_need_no_names(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace = done[0]
    groups = {row.group for row in messages(trace, 0, Kind.SEND)}
    assert len(groups) == 2
    assert {tuple(trace.members(group)) for group in groups} == {(0, 1)}


def test_waits_for_messages_are_waits(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    waits = [row for row in done[0].events[1].of_kind(Kind.WAIT) if row.name == WORK]
    assert sum(row.duration_ns for row in waits) > (STEPS - 2) * LATE_S * 1e9 / 2


def test_it_is_diagnosed_and_no_plan_is_made(
    done: tuple[Trace, list[dict[str, Any]]], tmp_path: Path
) -> None:
    path = str(done[0].path)
    said = CliRunner().invoke(cli, ["diagnose", path])
    assert said.exit_code == 0, said.output
    for command in (["replay", path], ["optimize", path, "-o", str(tmp_path / "plan.yaml")]):
        said = CliRunner().invoke(cli, command)
        assert said.exit_code != 0
        assert "point-to-point messages of the script" in str(said.exception)
        assert "\n" not in str(said.exception)
