"""The text report and the command: the verdict first, foreign names as plain text, one document with --json."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.synthetic import SyntheticJob, synthetic_trace, with_ranks, write_trace

from headway.cli.diagnose import diagnose as command
from headway.diagnosis import diagnose
from headway.errors import ClusterError, TraceError
from headway.report.text import _print, _table, print_diagnosis


def printed(job: SyntheticJob, width: int = 80) -> str:
    out = io.StringIO()
    print_diagnosis(diagnose(synthetic_trace(job)), Console(file=out, width=width))
    return out.getvalue()


def test_the_verdict_is_the_first_line() -> None:
    job = SyntheticJob(slow={(2, "backward"): 15.0})
    assert printed(job).splitlines()[0] == diagnose(synthetic_trace(job)).verdict


def test_tables_name_every_rank_and_fit() -> None:
    text = printed(SyntheticJob(slow={(2, "backward"): 15.0}))
    assert "Stragglers" in text
    assert "Critical path of step" in text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    for word in ("compute", "exposed comm.", "straggler", "input", "optimizer", "rest"):
        assert word in text


def test_names_are_not_markup() -> None:
    text = printed(SyntheticJob(modules=("[red]stem[/red]", "[/]", "[link=http://x]y[/link]")), width=120)
    assert "[red]stem[/red]" in text


def test_a_hundred_ranks_are_cut_and_that_is_said() -> None:
    assert "and 68 more ranks" in printed(SyntheticJob(world_size=100, steps=2))


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    folder = write_trace(SyntheticJob(slow={(1, "input"): 15.0}), tmp_path / "trace")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(command, [str(folder), "--json", "--html", str(page)], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["kind"] == "diagnosis"
    assert document["stragglers"][0]["rank"] == 1
    assert document["stragglers"][0]["cause"] == "input"
    assert "Wrote" in result.stderr
    assert document["verdict"].split(":")[0] in page.read_text()


def test_the_command_prints_text(tmp_path: Path) -> None:
    folder = write_trace(SyntheticJob(), tmp_path / "trace")
    result = CliRunner().invoke(command, [str(folder)], catch_exceptions=False)
    assert result.stdout.startswith("Nothing stands out: computation is 86 %")
    assert result.stderr == ""


def test_the_command_lets_complaints_pass(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="trace not found"):
        CliRunner().invoke(command, [str(tmp_path / "no")], catch_exceptions=False)
    folder = write_trace(SyntheticJob(), tmp_path / "trace")
    with pytest.raises(ClusterError, match="cluster file not found"):
        CliRunner().invoke(
            command, [str(folder), "--cluster", str(tmp_path / "no.yaml")], catch_exceptions=False
        )


def test_notes_are_printed() -> None:
    found = replace(diagnose(synthetic_trace()), notes=("7 events were dropped",))
    out = io.StringIO()
    print_diagnosis(found, Console(file=out, width=80))
    assert "Note: 7 events were dropped" in out.getvalue()


def test_a_busy_machine_is_told() -> None:
    trace = synthetic_trace(SyntheticJob(ranks_a_host=4))
    told = {"threads": 1, "cores": ((0, 3),), "load": 9.5}
    busy = with_ranks(trace, dict.fromkeys(trace.events, told))
    out = io.StringIO()
    print_diagnosis(diagnose(busy), Console(file=out, width=80))
    (note,) = (line for line in out.getvalue().splitlines() if "load 9.5 on 4 cores" in line)
    assert note.startswith("Note: ")
    assert note.endswith("Record again on an idle machine before you trust small differences.")


def test_a_title_is_one_line_however_narrow_its_table_is() -> None:
    table = _table("Critical path of step 15, in time order", ("rank", True), ("what", False))
    table.add_row("0", "forward")
    out = io.StringIO()
    _print(Console(file=out, width=80), table)
    title, header, _ = out.getvalue().splitlines()
    assert title == "Critical path of step 15, in time order"
    assert header.split() == ["rank", "what"]
