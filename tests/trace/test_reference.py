"""The page on trace files names what the types have, and its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.synthetic import SyntheticJob, write_trace

from headway.trace.events import TEXT_COLUMNS, Event, Kind
from headway.trace.format import Manifest

PAGE = Path(__file__).parents[2] / "docs" / "trace-format.md"


def rows_of(title: str) -> list[list[str]]:
    """The rows of the table below a title, without backticks."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_columns_and_their_types() -> None:
    columns = rows_of("Events")
    assert [row[0] for row in columns] == list(Event._fields)
    assert {row[0] for row in columns if row[1] == "text"} == set(TEXT_COLUMNS)


def test_kinds() -> None:
    kinds = [value for name, value in vars(Kind).items() if name.isupper()]
    assert [row[0] for row in rows_of("Kinds")] == kinds


def test_fields_of_the_manifest() -> None:
    assert [row[0] for row in rows_of("The manifest")] == list(Manifest.model_fields)


def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(SyntheticJob(world_size=2, steps=3), tmp_path / "trace")
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example
    exec(compile(example[1], str(PAGE), "exec"), {})
    assert re.search(r"^rank 1 on \S+ waited [\d.]+ ms$", capsys.readouterr().out, re.MULTILINE)
