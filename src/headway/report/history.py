"""Draws the history of a job step by step: the length of each step, its parts, and the steps that stand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Floats
from headway.diagnosis.breakdown import NS_A_MS, PARTS, RankTime, rank_time
from headway.diagnosis.communication import Communications
from headway.report import words
from headway.report.timeline import TIP_STYLE, apply_style
from headway.trace.format import Trace

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure  # noqa: N812


MAX_BARS = 400
MAX_OUTLIERS = 12
MANY_STEPS = 4  # needed for a step to stand out
STANDS_OUT = 0.10  # of the median step
SPREADS = 4.0  # times the usual spread of steps


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the longest of ``of_steps`` neighbouring steps. ``parts_ms`` is the mean over ranks."""

    step: int
    of_steps: tuple[int, int]
    max_ms: float
    median_ms: float
    parts_ms: tuple[float, ...]
    stands_out: bool


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than most. ``part`` grew most, by ``grew_ms`` averaged over ranks."""

    step: int
    max_ms: float
    part: str
    grew_ms: float


@dataclass(frozen=True, slots=True)
class History:
    """All recorded steps as at most MAX_BARS bars. ``parts`` are the names of the values in ``parts_ms``.

    The length of a step is that on its slowest rank; ``median_ms`` is the median of these over steps. ``outliers`` are
    sorted by length and limited to MAX_OUTLIERS; ``outlying`` counts all of them.
    """

    steps: int
    steps_a_bar: int
    parts: tuple[str, ...]
    bars: tuple[Bar, ...]
    median_ms: float
    outliers: tuple[Outlier, ...]
    outlying: int


def rank_times(trace: Trace, steps: tuple[int, ...], rows: Communications) -> dict[int, RankTime]:
    """Each rank's time over the recorded steps, as in the diagnosis."""
    return {
        rank: rank_time(rank, events, steps, rows.of_rank(rank))
        for rank, events in sorted(trace.events.items())
    }


def history(times: dict[int, RankTime], steps: tuple[int, ...], max_bars: int = MAX_BARS) -> History:
    """Summarises ``times`` step by step. ``steps`` are the numbers of the recorded steps, at least one."""
    lengths = np.stack([(time.step_end_ns - time.step_start_ns) / NS_A_MS for time in times.values()])
    longest, median = lengths.max(axis=0), np.median(lengths, axis=0)
    parts = sum((_parts(time) for time in times.values()), np.zeros((len(PARTS), len(steps)))) / len(times)
    outlying = _outlying(longest)
    a_bar = -(-len(steps) // max_bars)
    bars = []
    for first in range(0, len(steps), a_bar):
        last = min(first + a_bar, len(steps)) - 1
        at = first + int(np.argmax(longest[first : last + 1]))
        bars.append(
            Bar(
                steps[at],
                (steps[first], steps[last]),
                float(longest[at]),
                float(median[at]),
                tuple(parts[:, at].tolist()),
                at in outlying,
            )
        )
    return History(
        steps=len(steps),
        steps_a_bar=a_bar,
        parts=PARTS,
        bars=tuple(bars),
        median_ms=float(np.median(longest)),
        outliers=tuple(_outlier(int(at), steps, longest, parts) for at in outlying[:MAX_OUTLIERS]),
        outlying=len(outlying),
    )


def _parts(time: RankTime) -> Floats:
    """One rank's parts of each step in ms, shape (PARTS, steps); they add up to the step."""
    parts = {
        "computation": time.per_step(time.forward) + time.per_step(time.backward),
        "exposed_communication": time.per_step(time.exposed),
        "straggler_wait": time.per_step(time.straggling),
        "input": time.per_step(time.input),
        "optimizer": time.per_step(time.optimizer),
    }
    total_ns = time.step_end_ns - time.step_start_ns
    parts["rest"] = total_ns - np.sum(list(parts.values()), axis=0)
    return np.stack([parts.get(part, np.zeros_like(total_ns)) for part in PARTS]) / NS_A_MS


def _outlying(longest: Floats) -> npt.NDArray[np.int64]:
    """The indices of the steps that are far longer than most, longest first."""
    if len(longest) < MANY_STEPS:
        return np.zeros(0, dtype=np.int64)
    middle = np.median(longest)
    spread = 1.4826 * np.median(np.abs(longest - middle))
    indices = np.flatnonzero(longest > middle + max(SPREADS * spread, STANDS_OUT * middle))
    return indices[np.argsort(-longest[indices], kind="stable")]


def _outlier(at: int, steps: tuple[int, ...], longest: Floats, parts: Floats) -> Outlier:
    grew = parts[:, at] - np.median(parts, axis=1)
    most = int(np.argmax(grew))
    return Outlier(steps[at], float(longest[at]), PARTS[most], float(grew[most]))


FIGURE_NAME = "history"
_MOST_TIMES = 4.0  # median steps: longer bars are cut off
_LABELS = 12


def top_ms(past: History) -> float:
    """The upper end of the axis: a few very long steps must not flatten all others."""
    longest = max(bar.max_ms for bar in past.bars)
    return max(min(longest, _MOST_TIMES * past.median_ms), 1e-6)


def history_chart(past: History, drawn: tuple[int, ...]) -> Figure:
    """Draws ``past``. ``drawn`` are the numbers of the steps in the timeline, which a click goes to."""
    from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NoOverlap, Range1d
    from bokeh.models.annotations import BoxAnnotation
    from bokeh.plotting import figure

    top = top_ms(past)
    scale = words.scale(top)
    bars = past.bars
    plot = figure(
        name=FIGURE_NAME,
        x_range=Range1d(start=-0.6, end=len(bars) - 0.4),
        y_range=Range1d(start=0, end=1.12 * top * scale.factor),
        height=190,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
    )
    there = [
        at for at, bar in enumerate(bars) if bar.of_steps[0] <= drawn[-1] and bar.of_steps[1] >= drawn[0]
    ]
    if there:
        plot.add_layout(
            BoxAnnotation(
                left=there[0] - 0.5, right=there[-1] + 0.5, fill_color=words.DRAWN_STEPS, fill_alpha=1,
                line_color=None, level="image",
            )
        )  # fmt: skip
    source = ColumnDataSource(_columns(past, scale, top))
    width = 0.86 if len(bars) <= 150 else 1.0
    plot.vbar_stack(
        list(past.parts), x="x", width=width, source=source, line_color=None,
        fill_color=[words.PART_COLOURS.get(part, words.UNKNOWN_COLOUR) for part in past.parts],
    )  # fmt: skip
    plot.vbar(
        x="x", bottom="median", top="max", width=width, source=source, fill_color=words.INK, fill_alpha=0.25,
        line_color=None,
    )  # fmt: skip
    plot.segment(x0="from", x1="to", y0="max", y1="max", source=source, line_color=words.INK, line_width=1.5)
    marked = [at for at, bar in enumerate(bars) if bar.stands_out]
    plot.scatter(
        x=marked, y=[1.06 * top * scale.factor] * len(marked), marker="inverted_triangle", size=8,
        fill_color=words.HIT_COLOUR, line_color=None,
    )  # fmt: skip
    plot.add_layout(
        BoxAnnotation(
            name="history-view", left=0, right=0, visible=False, fill_color=None, line_color=words.INK,
            line_width=1.5, line_alpha=0.7,
        )
    )  # fmt: skip
    columns = plot.vbar(x="x", top=top * scale.factor, width=1, source=source, fill_alpha=0, line_color=None)
    plot.add_tools(
        HoverTool(
            renderers=[columns], mode="vline", point_policy="follow_mouse", visible=False, tooltips=_tip(past)
        )
    )  # fmt: skip
    every = max(-(-len(bars) // _LABELS), 1)
    plot.xaxis.ticker = FixedTicker(ticks=list(range(0, len(bars), every)))
    plot.xaxis.major_label_overrides = {at: str(bars[at].step) for at in range(0, len(bars), every)}
    plot.xaxis.major_label_policy = NoOverlap(min_distance=8)
    plot.xaxis.axis_label, plot.yaxis.axis_label = "step", scale.unit
    apply_style(plot)
    plot.ygrid.visible = True
    plot.ygrid.grid_line_color = words.RULE
    return plot


def _tip(past: History) -> str:
    """The tooltip: the step, and its parts with their colours."""
    row = "<tr><td>{}</td><td style='text-align:right;padding-left:14px'>@{}</td></tr>"
    square = "display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px"
    swatch = f"<span style='{square};background:{{}}'></span>{{}}"
    rows = [row.format("slowest rank", "slowest"), row.format("median rank", "middle")]
    for part in reversed(past.parts):
        colour = words.PART_COLOURS.get(part, words.UNKNOWN_COLOUR)
        rows.append(row.format(swatch.format(colour, words.short_label(part)), f"text_{part}"))
    return f"""<div style="{TIP_STYLE}"><b>step @step</b><table style="font:inherit">{"".join(rows)}</table></div>"""


def _columns(past: History, scale: words.Scale, top: float) -> dict[str, Any]:
    bars = past.bars
    columns: dict[str, Any] = {
        "x": list(range(len(bars))),
        "from": [at - 0.43 for at in range(len(bars))],
        "to": [at + 0.43 for at in range(len(bars))],
        "max": [min(bar.max_ms, 1.2 * top) * scale.factor for bar in bars],
        "median": [min(bar.median_ms, bar.max_ms, 1.2 * top) * scale.factor for bar in bars],
        "step": [_label(bar) for bar in bars],
        "slowest": [words.duration(bar.max_ms) for bar in bars],
        "middle": [words.duration(bar.median_ms) for bar in bars],
    }
    for index, part in enumerate(past.parts):
        columns[part] = [bar.parts_ms[index] * scale.factor for bar in bars]
        columns[f"text_{part}"] = [words.duration(bar.parts_ms[index]) for bar in bars]
    return columns


def _label(bar: Bar) -> str:
    first, last = bar.of_steps
    return str(bar.step) if first == last else f"{bar.step} (the longest of {first} to {last})"
