"""A tuner's decisions: written, read, drawn, and said by ``headway decisions``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.cli.main import run
from headway.errors import UserError
from headway.report.decisions import decisions_page, start_numbers, summary
from headway.strategies.decisions import DECISIONS_VARIABLE, PRINT_VARIABLE, Entry, Journal, read_journal
from headway.strategies.pipeline.tuning.follower import entry_of
from headway.strategies.pipeline.tuning.tuner import Decision

ORDERS = ("pipeline, 1F1B", "pipeline, <2F2B>")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "decisions.jsonl"
    monkeypatch.setenv(DECISIONS_VARIABLE, str(path))
    journal = Journal.wanted()
    assert journal is not None
    for step, (before, chosen) in enumerate(((0, 0), (0, 1), (1, 1))):
        reason = f"the network </script><b>changed</b> in step {step}"
        decision = Decision(step, before, chosen, reason, (100.0, 80.0), 99.0, {(0, 1): 0.15})
        journal.add(entry_of(decision, ORDERS))
    return path


def test_what_is_written_is_read(written: Path) -> None:
    entries = read_journal(written)
    assert [(each.step, each.before, each.order) for each in entries] == [
        (0, ORDERS[0], ORDERS[0]),
        (1, ORDERS[0], ORDERS[1]),
        (2, ORDERS[1], ORDERS[1]),
    ]
    assert entries[1].predicted_ms == {ORDERS[0]: 100.0, ORDERS[1]: 80.0}
    assert entries[1].links_gbps == {"0>1": 0.15}
    with written.open("a") as file:
        file.write('{"step": 3, "bef')  # being written
    assert len(read_journal(written)) == 3
    assert summary(entries) == "1 switch after 3 decisions; in force: pipeline, <2F2B>"


def test_what_a_job_wrote_before_it_was_started_again_stays(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with written.open("a") as file:
        file.write('{"step": 3, "bef')  # as it was killed
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    Journal(written).add(Entry(step=1, before=ORDERS[1], order=ORDERS[0], reason="a death", measured_ms=0.0))
    entries = read_journal(written)
    assert [(each.attempt, each.workers, each.step) for each in entries[-2:]] == [(0, 0, 2), (1, 3, 1)]
    assert start_numbers(entries) == [0, 0, 0, 1]
    assert "; restarted 1 time; " in summary(entries)
    assert run(["decisions", str(written)]) == 0
    assert "1 of start 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed", ['"step": 1e400', f'"step": {10**300}', '"links_gbps": {"0>1": NaN}', f'"workers": {2**60}']
)
def test_numbers_that_are_none_are_refused(written: Path, changed: str) -> None:
    entry = '{"step": 1, "before": "a", "order": "b", "reason": "c", "measured_ms": 1, ' + changed + "}\n"
    written.write_text(entry)
    with pytest.raises(UserError, match="line 1 of"):
        read_journal(written)


def test_nothing_is_written_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DECISIONS_VARIABLE, raising=False)
    monkeypatch.delenv(PRINT_VARIABLE, raising=False)
    assert Journal.wanted() is None


def test_a_folder_that_is_gone_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path / "none" / "file")
    journal.add(Entry(step=0, before=ORDERS[0], order=ORDERS[1], reason="why", measured_ms=0.0))
    assert "cannot write decisions" in caplog.text


@pytest.mark.parametrize("text", ["", "no JSON\n", "{}\n", '{"step": -1}\n', "[" * 100_000 + "\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(UserError):
        read_journal(tmp_path / "file")


def test_the_page_shows_every_step_and_escapes_reasons(written: Path) -> None:
    pytest.importorskip("bokeh")
    page = decisions_page(read_journal(written))
    assert "1 switch after 3 decisions" in page
    assert 'id="switches"' in page
    assert page.partition('id="all"')[2].count("</b> in step") == 0
    assert page.partition('id="all"')[2].count("&lt;b&gt;changed") == 3
    assert "default-src 'none'" in page
    assert "changed" in page
    assert "</script><b>changed" not in page
    assert "<script src" not in page


def test_the_command_prints_each_decision_with_its_reason(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = Entry(step=4, before=ORDERS[1], order=ORDERS[1], reason="as in step 3", measured_ms=9.0)
    for step in range(4, 60):
        Journal(written).add(same.model_copy(update={"step": step}))
    assert run(["decisions", str(written), "--html", str(tmp_path / "page.html")]) == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "1 switch after 59 decisions; in force: pipeline, <2F2B>"
    assert len(rows) == 4
    assert ("goes on with pipeline, 1F1B" in rows[0], "in step 0" in rows[0]) == (True, True)
    assert "now pipeline, <2F2B>, instead of pipeline, 1F1B" in rows[1]
    assert rows[3].startswith("4 to 59 ")
    assert rows[3].rstrip().endswith("as in step 3 (decided 56 times)")
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert run(["decisions", str(written), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["decisions"]) == 59
    assert run(["decisions", str(tmp_path / "missing")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_decisions_are_printed_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(DECISIONS_VARIABLE, raising=False)
    monkeypatch.setenv(PRINT_VARIABLE, "1")
    journal = Journal.wanted()
    assert journal is not None
    stays = Entry(step=8, before=ORDERS[0], order=ORDERS[0], reason="1.02 times as long", measured_ms=9.0)
    journal.add(stays)
    journal.add(stays.model_copy(update={"step": 16, "reason": "1.01 times as long"}))  # says nothing new
    switch = Entry(step=24, before=ORDERS[0], order=ORDERS[1], reason="a slow link", measured_ms=9.0)
    journal.add(switch)
    assert capsys.readouterr().err.splitlines() == [
        "headway: after step 8: goes on with pipeline, 1F1B: 1.02 times as long",
        "headway: after step 24: now pipeline, <2F2B>, instead of pipeline, 1F1B: a slow link",
    ]
