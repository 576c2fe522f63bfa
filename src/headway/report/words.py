"""Labels, colours and formatting for reports: durations, units, and text from traces made safe to show."""

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
"""Colours of averaging groups, by number."""

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
PALE_PASSES = (FORWARD_PASS, WEIGHT_GRADIENT)  # need dark text
PENDING_COLOUR = "#b9c4c2"
PATH_COLOUR = "#111827"
UNKNOWN_COLOUR = "#9aa1ab"
BLAMED_COLOUR = "#fdeedd"  # background of the blamed rank
BLAMED_EDGE = "#e59a45"
HIT_COLOUR = "#b3261e"  # frames search hits, marks outlier steps
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
"""Replacements for the figures' colours in dark mode."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


_SHORT_LABELS = {
    "computation": "compute",
    "exposed_communication": "exposed comm.",
    "straggler_wait": "straggler",
}


def part_label(part: str) -> str:
    """The label of a part of the step."""
    return PART_LABELS.get(part, part.replace("_", " ").capitalize())


def short_label(part: str) -> str:
    """The label of a part of the step for narrow columns."""
    return _SHORT_LABELS.get(part, part.replace("_", " "))


def kind_label(kind: str) -> str:
    """The label of a kind of event."""
    return KIND_LABELS.get(kind, kind.replace("_", " "))


def kind_colour(kind: str) -> str:
    """The colour of a kind of event."""
    return KIND_COLOURS.get(kind, UNKNOWN_COLOUR)


MAX_NAME = 200  # characters of a name from a trace

_UNITS_MS = ((1e-6, "ns"), (1e-3, "µs"), (1.0, "ms"), (1e3, "s"))
QUANTITY = re.compile(r"((?<![\w.])[+-]?\d[\d.,]* (?:%|(?:[kMGT]?i?B|[nµum]?s|min|[kMGT]?bit/s)\b))")
"""A number with its unit, which should stay on one line."""
_BLANKS = re.compile(r"[\t\n\v\f\r\x85\u2028\u2029]")
# Control characters, bidirectional marks, lone surrogates.
_UNSHOWABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


class Scale(NamedTuple):
    """The common unit of a table or axis: ``ms * factor`` is in ``unit``."""

    factor: float
    unit: str
    decimals: int

    def __call__(self, ms: float) -> str:
        """The number without its unit."""
        return f"{ms * self.factor:.{self.decimals}f}"


def duration(ms: float) -> str:
    """Formats a duration with three significant digits in a natural unit: ``340 µs``, ``2 min 5 s``."""
    size = abs(ms)
    if size == 0:
        return "0 ms"
    for scale, unit in _UNITS_MS:
        if size < 999.5 * scale:
            return f"{_three_digits(ms / scale) if unit != 'ns' else f'{ms / scale:.0f}'} {unit}"
    sign, seconds = "-" if ms < 0 else "", round(size / 1e3)
    for most, major_s, part, big, small in ((3600, 60, 1, "min", "s"), (48 * 3600, 3600, 60, "h", "min")):
        if seconds < most:
            return f"{sign}{seconds // major_s} {big} {seconds % major_s // part} {small}"
    return f"{sign}{seconds // 86400} days"


def scale(longest_ms: float) -> Scale:
    """The common unit for numbers up to ``longest_ms``."""
    for a_unit, unit in _UNITS_MS[1:]:
        if longest_ms < 9_999.5 * a_unit or unit == "s":
            value = longest_ms / a_unit
            return Scale(1 / a_unit, unit, 2 if value < 100 else 1 if value < 1000 else 0)
    raise AssertionError("seconds take any number")


def plain(text: str, limit: int | None = None) -> str:
    """Text from a trace as one printable line: characters that cannot be shown become U+FFFD."""
    text = _UNSHOWABLE.sub("\ufffd", _BLANKS.sub(" ", text if limit is None else text[: limit + 1]))
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def runs(numbers: Iterable[int], most: int = 4) -> str:
    """Formats numbers as sorted runs: ``0-7, 12``. Empty if that takes more than ``most`` runs."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if len(spans) > most:
        return ""
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
