"""Prepares the comparison of a recording with its baselines for the HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.diagnosis import Diagnosis
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.comparison import Comparison, Pair, SideBySide, StepSpread, side_by_side
from headway.report import words
from headway.report.job_view import plan_words

MAX_BUCKETS = 40
MAX_DOTS = 400
MAX_STRIPS = 8  # of baselines
STANDS_OUT = 0.01  # of the step
WIDTH, LANE, LEFT, AXIS = 1000.0, 46.0, 64.0, 22.0
TICKS = 5


@dataclass(frozen=True, slots=True)
class Baseline:
    """The recordings that a page compares with: names, diagnoses, and the resulting comparison."""

    names: tuple[str, ...]
    diagnoses: tuple[Diagnosis, ...]
    comparison: Comparison

    @classmethod
    def of(
        cls, folders: Sequence[Path], diagnoses: Sequence[Diagnosis], comparison: Comparison | None
    ) -> Baseline | None:
        """The recordings in ``folders``; None without a comparison."""
        if comparison is None:
            return None
        return cls(tuple(folder.resolve().name for folder in folders), tuple(diagnoses), comparison)


class Strip(NamedTuple):
    """The steps of one recording as dots on an axis, with a box around the middle half and a line at the median."""

    name: str
    top: float
    dots: tuple[tuple[float, float], ...]
    box: tuple[float, float]
    median: float
    title: str


class StepsPicture(NamedTuple):
    """Strips stacked vertically, and axis marks (x, label), the first at ``floor_ms``."""

    strips: tuple[Strip, ...]
    floor_ms: float
    marks: tuple[tuple[float, str], ...]
    width: float
    height: float
    lane: float


def comparison_values(baseline: Baseline, after: Diagnosis, name: str) -> dict[str, Any]:
    """The template's values for comparing ``after`` (of the trace ``name``) with ``baseline``."""
    pair = side_by_side(baseline.diagnoses, after)
    before = baseline.names[pair.typical]
    before = f"{before} (before)" if before == name else before
    many = len(baseline.names)
    mean = before if many == 1 else f"mean of {many} baselines"
    parts = {
        side: {part: getattr(row, part) for part in PARTS}
        for side, row in ((mean, pair.parts_before), (name, pair.parts_after))
    }
    longest_ms = max(sum(row.values()) for row in parts.values())
    buckets = sorted(pair.buckets, key=_exposed_ms, reverse=True)[:MAX_BUCKETS]
    step_ms = max(baseline.comparison.step_ms, baseline.comparison.baseline_step_ms)
    picture = steps_picture(pair, (*baseline.names, name))
    return {
        "baseline": before if many == 1 else f"{many} baselines",
        "typical": before if many > 1 else "",
        "comparison": baseline.comparison,
        "pair": pair,
        "sides": parts,
        "mean_name": mean,
        "side_names": [before, name],
        "longest_side_ms": max(longest_ms, 1e-9),
        "changed": [(fact.name, _cell(fact.before), _cell(fact.after)) for fact in pair.changed],
        "steps_picture": picture,
        "floor_ms": picture.floor_ms,
        "bucket_pairs": [bucket for bucket in pair.buckets if bucket in buckets],
        "bucket_pairs_left_out": len(pair.buckets) - len(buckets),
        "causes": _causes(baseline.comparison),
        "signed": signed,
        "change_class": lambda before_ms, after_ms: change_class(before_ms, after_ms, step_ms),
    }


def change_class(before_ms: float | None, after_ms: float | None, step_ms: float) -> str:
    """The CSS class of a cell: ``better`` or ``worse`` if the change is at least 1 % of the step, else empty."""
    difference_ms = 0.0 if before_ms is None or after_ms is None else after_ms - before_ms
    if abs(difference_ms) < STANDS_OUT * step_ms:
        return ""
    return "worse" if difference_ms > 0 else "better"


def signed(before_ms: float | None, after_ms: float | None) -> str:
    """The difference with its sign and unit; empty if either value is missing."""
    if before_ms is None or after_ms is None:
        return ""
    difference_ms = after_ms - before_ms
    return f"{'+' if difference_ms > 0 else ''}{words.duration(difference_ms)}"


def steps_picture(pair: SideBySide, names: Sequence[str]) -> StepsPicture:
    """Draws the steps of the first baselines and of the later recording on one axis, labelled with ``names``.

    Steps longer than four medians are drawn at the end of the axis.
    """
    named = list(zip(names, (*pair.steps_before, pair.steps_after), strict=True))
    spreads = [*named[:-1][:MAX_STRIPS], named[-1]]
    top_ms = max(min(spread.most_ms, 4 * spread.median_ms) for _, spread in spreads)
    least_ms = min(spread.least_ms for _, spread in spreads)
    margin_ms = max(0.05 * (top_ms - least_ms), 0.01 * top_ms, 1e-6)
    floor_ms, top_ms = max(least_ms - margin_ms, 0.0), top_ms + margin_ms

    def x(ms: float) -> float:
        return LEFT + (WIDTH - LEFT) * (min(ms, top_ms) - floor_ms) / (top_ms - floor_ms)

    return StepsPicture(
        strips=tuple(_strip(name, spread, at, x) for at, (name, spread) in enumerate(spreads)),
        floor_ms=floor_ms,
        marks=tuple((x(float(ms)), words.duration(float(ms))) for ms in np.linspace(floor_ms, top_ms, TICKS + 1)),
        width=WIDTH,
        height=len(spreads) * LANE + AXIS,
        lane=LANE,
    )  # fmt: skip


def _strip(name: str, spread: StepSpread, at: int, x: Callable[[float], float]) -> Strip:
    every = -(-len(spread.steps_ms) // MAX_DOTS)
    shown = spread.steps_ms[::every]
    dots = tuple(
        (x(ms), at * LANE + LANE / 2 + 9 * ((number * 0.618) % 1 - 0.5)) for number, ms in enumerate(shown)
    )
    title = (
        f"{name}: {len(spread.steps_ms)} steps, median {words.duration(spread.median_ms)}, middle half from "
        f"{words.duration(spread.quarter_ms)} to {words.duration(spread.three_quarters_ms)}"
    )
    box = x(spread.quarter_ms), x(spread.three_quarters_ms)
    return Strip(name, at * LANE, dots, box, x(spread.median_ms), title)


def _exposed_ms(pair: Pair[Any]) -> float:
    return max(float(side.exposed_ms) for side in (pair.before, pair.after) if side is not None)


def _causes(comparison: Comparison) -> list[str]:
    lines = []
    for what, causes in (("New", comparison.new_causes), ("Gone", comparison.gone_causes)):
        if causes:
            lines.append(f"{what}: {', '.join(cause.replace('_', ' ') for cause in causes)}.")
    return lines


def _cell(value: Any) -> str:
    """Formats a fact for a table cell."""
    if isinstance(value, Mapping):
        return plan_words(value) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (
            words.plain(", ".join(map(str, value[:8])) + (", …" if len(value) > 8 else ""), 300) or "unknown"
        )
    if isinstance(value, int):
        return f"{value:,}" if value else "unknown"
    return words.plain(str(value), 600) or "unknown"
