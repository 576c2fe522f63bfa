"""The explanation on the command line: in JSON and in text, the same numbers from the recorded step to the plan's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table
from tests.answers.asked import JOB, written

from headway.cli.main import run
from headway.cli.optimize import Answer, command_lines, job_command, plans_tables
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.optimization.candidate import UNCHANGED, Candidate
from headway.optimization.result import SearchResult, best_first
from headway.simulator.expectation import Expectation
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy

SLOW = replace(JOB, gbps=0.3)


def test_a_plan_is_explained_choice_by_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, plan = written(SLOW, tmp_path / "trace"), tmp_path / "plan.yaml"
    asked = ["optimize", str(trace), "-o", str(plan), "--strategy", "decoupled", "--explain"]
    assert run([*asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    explained = said["explanation"]
    assert explained["choices"][0]["name"] == "decoupled instead of ddp"
    assert explained["choices"][-1]["step_ms"] == explained["to_ms"]
    saved_ms = [each["saved_ms"] for each in explained["choices"]]
    assert sum(saved_ms) == pytest.approx(explained["from_ms"] - explained["to_ms"])
    for each in explained["choices"]:
        assert sum(each["saved_parts_ms"].values()) == pytest.approx(each["saved_ms"], abs=1e-6)
    assert sum(explained["critical_path_ms"].values()) == pytest.approx(explained["to_ms"])
    assert explained["further"]["target_ms"] < explained["to_ms"]
    assert explained["further"]["bandwidth"] > 1

    assert run(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Best of decoupled: decoupled, ")
    assert len(text[: text.index(" a step. ")].split()) < 20
    assert explained["next_bottleneck"] in text
    assert "times the bandwidth" in text
    assert "Choices are cumulative, from top to bottom." in text


def result(*gained: tuple[float, float], replayed_ms: float = 100.0) -> SearchResult:
    """A search of a job of 100 ms a step: what was recorded, and other plans of so many ms, off by up to so much."""
    weight = ParameterSpec(name="w", shape=(64,), dtype="float32", module="")
    job = Job.of(ModelSpec(parameters=(weight,), forward_order=("w",), ready_order=("w",)))
    recorded, other = DistributedDataParallelStrategy(), DecoupledStrategy(bucket_cap_bytes=64)
    had, has = recorded.decide(job), other.decide(job)
    candidates = [Candidate(recorded.describe(), recorded, had, Expectation(100.0, 100.0, 1.0), UNCHANGED)]
    for number, (ms, uncertainty_ms) in enumerate(gained):
        name, expected = f"{other.describe()}, variant {number}", Expectation(100.0, ms, uncertainty_ms)
        candidates.append(Candidate(name, other, has, expected, ("decoupled instead of ddp",)))
    return SearchResult(100.0, replayed_ms, best_first(candidates), 50.0, 1.0)


def answer_of(found: SearchResult) -> Answer:
    measure, run_line = command_lines(
        [Path("trace")], Path("plan.yaml"), (), ("torchrun", "--nproc-per-node", "2", "a b.py"), 2
    )
    return Answer(found, found.best(), None, "", Path("plan.yaml"), measure, run_line)


def test_the_first_line_says_what_to_do_and_commands_are_ready_to_paste() -> None:
    faster, unclear = answer_of(result((80.0, 5.0))), answer_of(result((97.0, 5.0)))
    off = answer_of(result((80.0, 5.0), replayed_ms=126.0))
    assert faster.headline().startswith("Use decoupled, buckets of ")
    assert unclear.headline().startswith("Keep what you have: ")
    assert (
        off.headline()
        == "This recording cannot rank plans: its replay is 26 % slower than the recorded step."
    )
    assert (faster.keeps_recorded, unclear.keeps_recorded, off.keeps_recorded) == (False, True, True)
    assert "keep what you have" in next(off.reasons())
    for answer in (faster, unclear, off):
        assert len(answer.headline().split()) < 20
        lines = [*answer.next_steps()]
        assert "  headway run --plan plan.yaml -- torchrun --nproc-per-node 2 'a b.py'" in lines
        assert (
            "  headway optimize trace -o plan.yaml --measure -- torchrun --nproc-per-node 2 'a b.py'" in lines
        )
    assert "changes nothing" in next(unclear.next_steps())
    assert "The best other plan, decoupled, buckets of" in " ".join(unclear.reasons())


def test_the_table_has_the_best_of_each_kind_and_what_needs_another_script_apart() -> None:
    found = result(*((80.0 + number, 5.0) for number in range(20)))
    cut = replace(found.candidates[0], recut=Job.of(ModelSpec(parameters=())), name="2 stages")
    found = replace(found, for_other_scripts=(cut,))
    tables = [part for part in plans_tables(found, found.best(), every=False) if isinstance(part, Table)]
    assert [table.row_count for table in tables] == [2, 1]
    assert "as it is" in str(tables[0].title)
    assert "change to the script" in str(tables[1].title)
    every = [part for part in plans_tables(found, found.best(), every=True) if isinstance(part, Table)]
    assert [table.row_count for table in every] == [21, 1]


def test_the_jobs_own_command_is_shown_and_nothing_that_a_terminal_would_obey() -> None:
    under = (
        "headway",
        "record",
        "-o",
        "t",
        "--",
        "python",
        "-P",
        "-m",
        "headway",
        "run",
        "--plan",
        "p",
        "--",
        "torchrun",
    )
    assert job_command(under) == ("torchrun",)
    in_lab = ("headway", "lab", "run", "--hosts", "2", "--", "python", "train.py")
    assert job_command(("headway", "run", "--plan", "p", "--", *in_lab)) == in_lab
    assert job_command(("torchrun", "train.py", "--", "x")) == ("torchrun", "train.py", "--", "x")
    for command in ((), ("torchrun", "\x1b[2J")):
        _, run_line = command_lines([Path("t")], Path("p"), (), command, 2)
        assert run_line == "headway run --plan p -- COMMAND"
    assert (
        command_lines([Path("t")], Path("p"), (), ("torchrun", "--nproc-per-node", "4", "t.py"), 2)[0] == ""
    )


def test_an_unknown_strategy_is_refused_before_anything_is_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["optimize", str(written(JOB, tmp_path / "trace")), "--strategy", "telepathy"]) == 2
    assert "unknown strategy; got telepathy; expected ddp or decoupled" in capsys.readouterr().err


def test_a_busy_machine_is_told() -> None:
    busy = replace(answer_of(result()), contention="vm was busy with other work: load 3.4 on 2 cores.")
    assert busy.notes() == ["Note: vm was busy with other work: load 3.4 on 2 cores."]
    assert answer_of(result()).notes() == []


@pytest.mark.parametrize("can_rank", [True, False])
def test_a_recording_that_cannot_rank_plans_bounds_none(
    can_rank: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SearchResult, "can_rank", property(lambda _: can_rank))
    trace, page = written(JOB, tmp_path / "trace"), tmp_path / "page.html"
    assert run(["optimize", str(trace), "-o", str(tmp_path / "plan.yaml"), "--html", str(page)]) == 0
    assert ("above the bound of" in capsys.readouterr().out) == can_rank
    assert ("above the bound of" in page.read_text()) == can_rank
