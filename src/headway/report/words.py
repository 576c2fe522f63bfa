"""Numbers and foreign text as the page shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from headway.trace.events import Kind

PART_LABELS = {
    "computation": "Computation",
    "exposed_communication": "Exposed communication",
    "straggler_wait": "Waiting for a straggler",
    "input": "Waiting for input",
    "optimizer": "Optimizer",
    "rest": "Everything else",
}
PART_COLOURS = {
    "computation": "#3f7fb5",
    "exposed_communication": "#d1495b",
    "straggler_wait": "#ee8434",
    "input": "#e3b23c",
    "optimizer": "#8a6bb1",
    "rest": "#b8bec7",
}

GROUP_COLOURS = (
    "#3f7fb5", "#d1495b", "#2a9d8f", "#8a6bb1", "#ee8434", "#5b7f2b", "#7c4a1e", "#4b5563",
)  # fmt: skip
"""Of groups of ranks, by their numbers."""

KIND_LABELS = {
    Kind.INPUT: "input",
    Kind.FORWARD: "forward",
    Kind.FORWARD_PASS: "forward, between modules",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_PASS: "backward, between modules",
    Kind.OPERATOR: "operator",
    Kind.READ: "gradients or parameters read",
    Kind.OPTIMIZER: "optimizer",
    Kind.UPDATE: "update",
    Kind.SUM: "sum on a server",
    Kind.WAIT: "wait",
    Kind.PAUSE: "pause",
    Kind.IDLE: "idle",
    Kind.COLLECTIVE: "collective",
    Kind.SEND: "send",
    Kind.RECEIVE: "receive",
    Kind.PUSH: "push to a server",
    Kind.PULL: "pull from a server",
}
KIND_COLOURS = {
    Kind.INPUT: "#e3b23c",
    Kind.FORWARD: "#6fa8d6",
    Kind.FORWARD_PASS: "#cfe1f0",
    Kind.BACKWARD: "#2f6690",
    Kind.BACKWARD_PASS: "#a9c2d6",
    Kind.OPERATOR: "#7d8ea3",
    Kind.READ: "#b27fa6",
    Kind.OPTIMIZER: "#8a6bb1",
    Kind.UPDATE: "#b49fd0",
    Kind.SUM: "#7c4a1e",
    Kind.WAIT: "#f0b3bb",
    Kind.PAUSE: "#4b5563",
    Kind.IDLE: "#dfe3e8",
    Kind.COLLECTIVE: "#2a9d8f",
    Kind.SEND: "#76b041",
    Kind.RECEIVE: "#a5ce7c",
    Kind.PUSH: "#b5651d",
    Kind.PULL: "#dba36b",
}
FORWARD_PASS, WHOLE_BACKWARD, UPDATE_PASS, WAITING = "forward", "backward", "update", "waiting"
INPUT_GRADIENT, WEIGHT_GRADIENT = "gradients of inputs", "gradients of weights"
MEMORY_COLOURS = {
    "parameters": "#2f6690",
    "optimizer state": "#8a6bb1",
    "buffers": "#b8bec7",
    "DDP's buckets": "#2a9d8f",
    "gradients": "#ee8434",
    "activations and temporary tensors": "#e3b23c",
}
PASS_COLOURS = {
    FORWARD_PASS: "#6fa8d6",
    WHOLE_BACKWARD: "#2f6690",
    INPUT_GRADIENT: "#1f7a70",
    WEIGHT_GRADIENT: "#8fcabf",
    UPDATE_PASS: "#8a6bb1",
    WAITING: "#f7dfe2",
}
PALE_PASSES = (FORWARD_PASS, WEIGHT_GRADIENT)  # on which dark words stand out
PENDING_COLOUR = "#b9c4c2"
PATH_COLOUR = "#111827"
UNKNOWN_COLOUR = "#9aa1ab"
BLAMED_COLOUR = "#fdeedd"  # behind the rows of the rank that is blamed
BLAMED_EDGE = "#e59a45"
HIT_COLOUR = "#b3261e"  # around the hit of a search, and where a step stands out
STEP_BORDER, AXIS = "#8a94a0", "#c3cad3"
DRAWN_STEPS, EVEN_STEP, ODD_STEP = "#e8f0f7", "#dde4ec", "#eef2f6"
INK, MUTED, RULE, ACCENT = "#1f2933", "#5f6975", "#e3e7ec", "#2f6690"
DARK = {
    "white": "#1a2129",
    INK: "#e3e8ee",
    MUTED: "#9ba8b6",
    RULE: "#2f3944",
    PATH_COLOUR: "#f4f6f8",
    BLAMED_COLOUR: "#45321c",
    STEP_BORDER: "#6d7a88",
    AXIS: "#4a5663",
    DRAWN_STEPS: "#22303f",
    EVEN_STEP: "#2f3a46",
    ODD_STEP: "#242d37",
}
"""What stands for colours of figures where the reader has asked for dark pages."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


_SHORT_LABELS = {
    "computation": "compute",
    "exposed_communication": "exposed comm.",
    "straggler_wait": "straggler",
}


def part_label(part: str) -> str:
    """The words for a part of the step."""
    return PART_LABELS.get(part, part.replace("_", " ").capitalize())


def short_label(part: str) -> str:
    """The words for a part of the step where a column is narrow."""
    return _SHORT_LABELS.get(part, part.replace("_", " "))


def kind_label(kind: str) -> str:
    """The words for a kind of event."""
    return KIND_LABELS.get(kind, kind.replace("_", " "))


def kind_colour(kind: str) -> str:
    """The colour of a kind of event."""
    return KIND_COLOURS.get(kind, UNKNOWN_COLOUR)


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
