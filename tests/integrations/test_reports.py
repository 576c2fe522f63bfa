"""What processes say of themselves is foreign text, which the launcher reads or passes over."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from headway.integrations import activate, reports
from headway.integrations.launch import PLAN_VARIABLE, RECORD_VARIABLE, injected_environment
from headway.integrations.reports import MAX_REPORT_BYTES, REPORTS_VARIABLE, read_reports


def test_a_process_replaces_its_own_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("HEADWAY_HOST", "host3")
    monkeypatch.setattr(reports, "_report", {})
    assert reports.update(rank=1, world_size=2)
    assert reports.update(refused="no\x1b[2J\nmore")
    (report,) = read_reports(tmp_path)
    assert (report.pid, report.rank, report.world_size) == (os.getpid(), 1, 2)
    assert (report.host, report.host_in_plans) == (socket.gethostname(), "host3")
    assert report.refused == "no [2J more"
    assert reports.reported("rank") == 1
    reports.withdraw()
    assert read_reports(tmp_path) == (report,), "it has something to say"
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert reports.reported("rank") is None, "a forked child is a process of its own"


def test_a_report_that_says_nothing_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPORTS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(reports, "_report", {})
    assert reports.update()
    reports.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_within_another_leaves_both_informed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    outer.mkdir()
    inner.mkdir()
    monkeypatch.setenv(REPORTS_VARIABLE, reports.reports_value({REPORTS_VARIABLE: str(outer)}, inner))
    monkeypatch.setattr(reports, "_report", {})
    assert reports.update(rank=0, applied=True)
    assert [report.applied for report in (*read_reports(outer), *read_reports(inner))] == [True, True]


def test_without_a_folder_nobody_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_report", {})
    monkeypatch.delenv(REPORTS_VARIABLE, raising=False)
    assert not reports.update(rank=0)
    monkeypatch.setenv(REPORTS_VARIABLE, str(tmp_path / "gone"))
    assert not reports.update(rank=0)
    assert read_reports(tmp_path / "gone") == ()


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    for number, text in enumerate(
        ["", "[]", "{", '{"rank": "one"}', '{"rank": true}', '"x"' * MAX_REPORT_BYTES, "[" * 9000]
    ):
        (tmp_path / f"process-{number}.json").write_text(text)
    (tmp_path / "process-a.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "process-b.json")
    (tmp_path / "process-c.json").write_text(json.dumps({"rank": 1, "pid": 3, "more": 1}))
    (tmp_path / "process-d.json").write_text(json.dumps({"rank": 0}))
    assert [(report.rank, report.pid) for report in read_reports(tmp_path)] == [(0, 0), (1, 3)]


def test_what_a_rank_has_started_is_left_alone_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REPORTS_VARIABLE, str(tmp_path))
    monkeypatch.setenv(RECORD_VARIABLE, "no options at all")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "no plan"))
    monkeypatch.setenv(reports.RANK_VARIABLE, str(os.getppid()))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    told: list[bool] = []
    done: set[int] = set()
    for _ in range(2):
        activate._activate(done, lambda: told.append(True))
    assert told
    assert not reports.update(refused="an error of its own")
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert said.count("headway: ignoring a process group of 1 rank: it was started by rank process") == 1
    assert len(said.splitlines()) == 1
    assert reports.RANK_VARIABLE not in injected_environment(os.environ)


def test_a_rank_is_not_below_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reports.RANK_VARIABLE, str(os.getpid()))
    assert not reports.is_started_by_rank()
