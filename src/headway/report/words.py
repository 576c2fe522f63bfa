"""Numbers and foreign text as the page shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_NAME = 200  # characters of a foreign name that the page holds

_UNITS_MS = ((1e-6, "ns"), (1e-3, "µs"), (1.0, "ms"), (1e3, "s"))
QUANTITY = re.compile(r"((?<![\w.])[+-]?\d[\d.,]* (?:%|(?:[kMGT]?i?B|[nµum]?s|min|[kMGT]?bit/s)\b))")
"""A number and its unit, which belong on one line."""
_BLANKS = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]")
# Control characters, marks that turn the direction of what follows, halves of surrogate pairs.
_UNSHOWABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Scale(NamedTuple):
    """One unit for a whole table or axis: ``ms * factor`` is in ``unit``."""

    factor: float
    unit: str
    decimals: int

    def __call__(self, ms: float) -> str:
        """The number alone, without its unit."""
        return f"{ms * self.factor:.{self.decimals}f}"


def duration(ms: float) -> str:
    """A duration with three digits that count, in the unit people would use: ``340 µs``, ``2 min 5 s``."""
    size = abs(ms)
    if size == 0:
        return "0 ms"
    for scale, unit in _UNITS_MS:
        if size < 999.5 * scale:
            return f"{_three_digits(ms / scale) if unit != 'ns' else f'{ms / scale:.0f}'} {unit}"
    sign, seconds = "-" if ms < 0 else "", round(size / 1e3)
    for most, whole, part, big, small in ((3600, 60, 1, "min", "s"), (48 * 3600, 3600, 60, "h", "min")):
        if seconds < most:
            return f"{sign}{seconds // whole} {big} {seconds % whole // part} {small}"
    return f"{sign}{seconds // 86400} days"


def scale(longest_ms: float) -> Scale:
    """The unit in which numbers up to ``longest_ms`` are compared with each other."""
    for a_unit, unit in _UNITS_MS[1:]:
        if longest_ms < 9_999.5 * a_unit or unit == "s":
            value = longest_ms / a_unit
            return Scale(1 / a_unit, unit, 2 if value < 100 else 1 if value < 1000 else 0)
    raise AssertionError("seconds take any number")


def plain(text: str, limit: int | None = None) -> str:
    """Foreign text as one line that shows every character: what cannot be shown becomes U+FFFD."""
    text = _UNSHOWABLE.sub("\ufffd", _BLANKS.sub(" ", text if limit is None else text[: limit + 1]))
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def runs(numbers: Iterable[int], most: int = 4) -> str:
    """Numbers in order as runs: ``0-7, 12``. Empty where that would take more than ``most`` runs."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    if len(found) > most:
        return ""
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
