"""Durations, scales and foreign text as the page words them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report import words


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (0.000012, "12 ns"),
        (0.34, "340 µs"),
        (0.00152, "1.52 µs"),
        (0.9994, "999 µs"),
        (0.9996, "1.00 ms"),
        (12.34, "12.3 ms"),
        (999.4, "999 ms"),
        (1234, "1.23 s"),
        (125_000, "125 s"),
        (1_025_000, "17 min 5 s"),
        (2 * 3_600_000 + 5 * 60_000, "2 h 5 min"),
        (90 * 86_400_000, "90 days"),
        (-12.34, "-12.3 ms"),
    ],
)
def test_durations(ms: float, text: str) -> None:
    assert words.duration(ms) == text


@given(st.floats(min_value=1e-6, max_value=1e12))
def test_durations_are_short_and_have_a_unit(ms: float) -> None:
    text = words.duration(ms)
    assert len(text) <= 20
    assert text.split()[-1] in {"ns", "µs", "ms", "s", "min", "days"}
    assert "e" not in text.replace("days", "")


@pytest.mark.parametrize(
    ("longest", "value", "unit"),
    [(45.678, "45.68", "ms"), (456.78, "456.8", "ms"), (0.045, "45.00", "µs"), (45_678, "45.68", "s")],
)
def test_a_table_has_one_unit(longest: float, value: str, unit: str) -> None:
    scale = words.scale(longest)
    assert (scale(longest), scale.unit) == (value, unit)


@given(st.text(st.characters(), max_size=50))
def test_foreign_text_can_be_shown(text: str) -> None:
    shown = words.plain(text)
    shown.encode()
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    assert len(shown) == len(text)


def test_foreign_text_is_cut() -> None:
    assert words.plain("x" * 10**6, 10) == "xxxxxxxxx…"
    assert words.plain("a\tb\nc\u202ed\x00\ud800") == "a b c\ufffdd\ufffd\ufffd"


def test_runs() -> None:
    assert words.runs(range(8)) == "0-7"
    assert words.runs([3]) == "3"
    assert words.runs([9, 0, 1, 2, 5]) == "0-2, 5, 9"
    assert words.runs(range(0, 20, 2)) == ""
