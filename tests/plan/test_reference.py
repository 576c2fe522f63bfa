"""The reference page of plan files is what the types say, and its example is a plan."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.plan.reference import HEAD, page

from headway.plan import Plan

PAGE = Path(__file__).parents[2] / "docs" / "plan-files.md"


def test_the_page_is_that_of_the_types() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.plan.reference > docs/plan-files.md"
    assert page().count("|  |") == 0, "a field without a meaning"


def test_the_example_is_a_plan(tmp_path: Path) -> None:
    lines = [line for line in HEAD.splitlines() if line.startswith("    ")]
    (tmp_path / "plan.yaml").write_text(textwrap.dedent("\n".join(lines)))
    assert Plan.load(tmp_path / "plan.yaml").world_size == 4
