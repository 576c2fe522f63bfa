"""Which tests `make test` leaves out, beside those marked in their files, and what still covers what they prove.

``tests/exhaustive.yaml`` names them by file: a test, or one of its cases as ``test[case]``, and a test that covers it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).with_suffix(".yaml")
ALL = "HEADWAY_TESTS"
"""Set to "all" where examples are drawn as often as tests ask for."""


def examples(number: int) -> int:
    """How many examples to draw where everything is run, or by default: a quarter, and at least ten."""
    return number if os.environ.get(ALL) == "all" else min(number, max(10, number // 4))


@cache
def left_out() -> dict[str, dict[str, str]]:
    """By file, below ``tests``: what is left out, and what covers it."""
    return yaml.safe_load(FILE.read_text()) or {}


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests that the list names."""
    files = left_out()
    for item in items:
        file, _, test = item.nodeid.removeprefix("tests/").partition("::")
        names = files.get(file, {})
        if test in names or test.partition("[")[0] in names:
            item.add_marker(pytest.mark.exhaustive)


def problems(items: list[pytest.Item]) -> Iterator[str]:
    """What is wrong with the list, where ``items`` are all tests: a name that none has, a cover that is left out."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        test = item.nodeid.removeprefix("tests/")
        for name in {test, test.partition("[")[0], test.partition("::")[0]}:
            by_test.setdefault(name, []).append(item)
    for file, names in left_out().items():
        for name, cover in names.items():
            if f"{file}::{name}" not in by_test:
                yield f"{file}::{name} does not exist"
            covering = by_test.get(cover if "/" in cover else f"{file}::{cover}", [])
            if not any(item.get_closest_marker("exhaustive") is None for item in covering):
                yield f"{file}::{name}: {cover} is no test of the default suite"
