"""Planning in a process of its own while training goes on, and where that fails."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.jobs import Alone, layered_job
from tests.strategies.test_shortlist import large_question, question_of

from headway.job import Job
from headway.strategies import helper_process
from headway.strategies.adaptive import planning_process
from headway.strategies.adaptive.proposals import Setting
from headway.strategies.adaptive.proposer import PlannedProposer
from headway.strategies.adaptive.shortlist import shortlist
from headway.strategies.candidates import Candidate, Question, TuningEndedError
from headway.strategies.decoupled.policy import DecoupledStrategy


@pytest.mark.parametrize("layers", [12, 40])
def test_a_large_model_is_planned_in_a_process_while_training_goes_on(layers: int) -> None:
    job = layered_job([20_000] * layers)
    question = question_of(job, DecoupledStrategy().decide(Job.of(job.model)), ("parameters",))
    proposer, alone = PlannedProposer(), Alone()
    proposer.begin(Setting(question, alone))  # type: ignore[arg-type]
    asked, deadline = 1, time.monotonic() + 100
    while not proposer.is_ready():
        asked += 1
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert (asked == 1) == (layers == 12)
    assert question.learned is not None
    expected = [each.strategy for each in shortlist(question)]
    assert [each.strategy for each in proposer._left] == expected


def _answers(proposer: PlannedProposer, question: Question) -> list[Candidate]:
    deadline = time.monotonic() + 60
    while not proposer.is_ready():
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert proposer._left == shortlist(question, by_guess=True)
    assert any(each.is_stock for each in proposer._left)
    return proposer._left


def test_where_planning_dies_stock_ddp_and_caps_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    question, proposer = large_question(), PlannedProposer()
    proposer.begin(Setting(question, Alone()))  # type: ignore[arg-type]
    assert proposer._planning is not None
    assert proposer._planning._process is not None
    proposer._planning._process.kill()
    _answers(proposer, question)
    assert "its process ended early" in caplog.text


def test_where_no_process_can_be_had_stock_ddp_and_caps_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: str) -> None:
        raise BlockingIOError("no process")

    monkeypatch.setattr(helper_process, "begin", none)
    question, proposer = large_question(), PlannedProposer()
    proposer.begin(Setting(question, Alone()))  # type: ignore[arg-type]
    _answers(proposer, question)


@pytest.mark.parametrize("said", [b"", b"no shortlist", b"\xff", b"{}\n{"])
def test_what_is_no_shortlist_is_a_failure(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def saying(_: str) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.stdin.buffer.read(); sys.stdout.buffer.write({said!r})"
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(helper_process, "begin", saying)
    question, proposer = large_question(), PlannedProposer()
    proposer.begin(Setting(question, Alone()))  # type: ignore[arg-type]
    _answers(proposer, question)


def test_neither_the_folder_nor_what_libraries_print_disturbs_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    (tmp_path / "printing").mkdir()
    (tmp_path / "printing" / "sitecustomize.py").write_text("print('loaded')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "printing")
    job = layered_job([20_000] * 40)
    question = question_of(job, DecoupledStrategy().decide(Job.of(job.model)), ("parameters",))
    proposer = PlannedProposer()
    proposer.begin(Setting(question, Alone()))  # type: ignore[arg-type]
    deadline = time.monotonic() + 100
    while not proposer.is_ready():
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert any(each.predicted_ms is not None for each in proposer._left)


def test_what_nothing_was_learned_for_and_cannot_be_guessed_ends_tuning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: Question) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(planning_process, "shortlist", fails)
    proposer = PlannedProposer()
    proposer.begin(Setting(replace(large_question(), learned=None), Alone()))  # type: ignore[arg-type]
    with pytest.raises(TuningEndedError, match="ZeroDivisionError"):
        proposer.is_ready()
