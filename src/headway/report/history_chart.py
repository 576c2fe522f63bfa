"""The history as a Bokeh figure: one stacked bar a step, a cap at the slowest rank, marks where steps stand out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.report import palette, words
from headway.report.history import Bar, History
from headway.report.timeline import TIP_STYLE, dress

if TYPE_CHECKING:
    from bokeh.plotting import figure as Figure  # noqa: N812

FIGURE_NAME = "history"
_MOST_TIMES = 4.0  # the median step: what is longer is cut off at the top
_LABELS = 12


def top_ms(past: History) -> float:
    """Up to where bars are drawn: a few very long steps must not flatten all others."""
    longest = max(bar.max_ms for bar in past.bars)
    return max(min(longest, _MOST_TIMES * past.median_ms), 1e-6)


def history_chart(past: History, drawn: tuple[int, ...]) -> Figure:
    """Draw ``past``; ``drawn`` are the numbers of the steps that the timeline shows, and to which a click leads."""
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
                left=there[0] - 0.5, right=there[-1] + 0.5, fill_color=palette.DRAWN_STEPS, fill_alpha=1,
                line_color=None, level="image",
            )
        )  # fmt: skip
    source = ColumnDataSource(_columns(past, scale, top))
    width = 0.86 if len(bars) <= 150 else 1.0
    plot.vbar_stack(
        list(past.parts), x="x", width=width, source=source, line_color=None,
        fill_color=[palette.PART_COLOURS.get(part, palette.UNKNOWN_COLOUR) for part in past.parts],
    )  # fmt: skip
    plot.vbar(
        x="x", bottom="median", top="max", width=width, source=source, fill_color=palette.INK, fill_alpha=0.25,
        line_color=None,
    )  # fmt: skip
    plot.segment(
        x0="from", x1="to", y0="max", y1="max", source=source, line_color=palette.INK, line_width=1.5
    )
    marked = [at for at, bar in enumerate(bars) if bar.stands_out]
    plot.scatter(
        x=marked, y=[1.06 * top * scale.factor] * len(marked), marker="inverted_triangle", size=8,
        fill_color=palette.HIT_COLOUR, line_color=None,
    )  # fmt: skip
    plot.add_layout(
        BoxAnnotation(
            name="history-view", left=0, right=0, visible=False, fill_color=None, line_color=palette.INK,
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
    dress(plot)
    plot.ygrid.visible = True
    plot.ygrid.grid_line_color = palette.RULE
    return plot


def _tip(past: History) -> str:
    """What is shown where the pointer is: the step, and its parts with their colours."""
    row = "<tr><td>{}</td><td style='text-align:right;padding-left:14px'>@{}</td></tr>"
    square = "display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px"
    swatch = f"<span style='{square};background:{{}}'></span>{{}}"
    rows = [row.format("slowest rank", "slowest"), row.format("median rank", "middle")]
    for part in reversed(past.parts):
        colour = palette.PART_COLOURS.get(part, palette.UNKNOWN_COLOUR)
        rows.append(row.format(swatch.format(colour, palette.short_label(part)), f"text_{part}"))
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
