"""The examples of the guide are what the command prints."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.cli.main import run
from headway.version import __version__

GUIDE = Path(__file__).parents[3] / "docs" / "settings.md"
BLOCK = re.compile(r"(?:^(?:    .*)?\n)+", re.MULTILINE)


def _blocks() -> Iterator[str]:
    """What is indented, without the indent."""
    for found in BLOCK.findall(GUIDE.read_text()):
        if text := textwrap.dedent(found).strip("\n"):
            yield text


PLAN = next(block for block in _blocks() if block.startswith("format:"))
EXAMPLES = [block for block in _blocks() if block.startswith("$ headway settings plan.yaml")]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_print_what_the_guide_says(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    command, _, expected = example.partition("\n")
    assert run(command.split()[2:]) == 0
    assert capsys.readouterr().out.replace(f"Headway {__version__}:", "Headway:").strip("\n") == expected


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2
