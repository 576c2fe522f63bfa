"""The kept answers are still given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.answers import asked


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return asked.answers(tmp_path_factory.mktemp("answers"))


def test_every_answer_is_the_kept_one(found: dict[str, Any]) -> None:
    kept = json.loads(Path(asked.KEPT).read_text())
    differing = {question: (kept.get(question), found.get(question)) for question in {**kept, **found}}
    differing = {question: both for question, both in differing.items() if both[0] != both[1]}
    assert not differing, differing


def test_nothing_is_refused(found: dict[str, Any]) -> None:
    assert [question for question, answer in found.items() if str(answer).startswith("refused")] == []
