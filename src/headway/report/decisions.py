"""A page that draws what was decided while a job trained: how long steps took, under which plan, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.report import palette, words
from headway.report.timeline import require_bokeh
from headway.units import counted

if TYPE_CHECKING:
    from bokeh.models.renderers import DataRenderer

    from headway.strategies.decisions import Entry

MAX_DRAWN = 20_000
_COLOURS = ("#2b6ca3", "#c8702a", "#3f8f5b", "#8a5aa8", "#b0413e", "#6b6b6b", "#a58a1f", "#3a9aa5")


def decisions_page(entries: Sequence[Entry]) -> str:
    """The page as one HTML text that loads nothing; of a long run its last ``MAX_DRAWN`` steps are drawn.

    Raises UserError where Bokeh is not installed.
    """
    require_bokeh()
    from bokeh.embed import file_html
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    shown = entries[-MAX_DRAWN:]
    orders = list(
        dict.fromkeys(name for each in shown for name in (each.before, *each.predicted_ms, each.order))
    )
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(orders)}
    plot = figure(
        height=420, sizing_mode="stretch_width", x_axis_label="step", y_axis_label="ms a step",
        title=summary(entries), tools="xpan,xwheel_zoom,reset,save",
    )  # fmt: skip
    measured: list[DataRenderer] = []
    for name in orders:
        expected = [each.predicted_ms.get(name, float("nan")) for each in shown]
        plot.line(
            [each.step for each in shown], expected, color=colours[name], alpha=0.45, line_dash="dashed"
        )
        own = [each for each in shown if each.before == name]
        source = ColumnDataSource(_columns(own))
        if own:
            points = plot.scatter(
                "step", "measured_ms", source=source, size=7, color=colours[name],
                legend_label=words.plain(name),
            )  # fmt: skip
            measured.append(points)
    for each in shown:
        if each.switches:
            plot.add_layout(
                Span(
                    location=each.step + 0.5, dimension="height", line_color=palette.MUTED, line_dash="dotted"
                )
            )
    tips = [
        ("step", "@step"),
        ("took", "@measured_ms{0.0} ms"),
        ("decided", "@order"),
        ("as", "@reason"),
        ("links", "@links"),
    ]
    plot.add_tools(HoverTool(tooltips=tips, renderers=measured))
    if plot.legend:
        plot.legend.title = "in force (dashed: expected)"
    return str(file_html(plot, INLINE, title="Decisions while training"))


def summary(entries: Sequence[Entry]) -> str:
    """In one line: how often the order was changed, and which is in force."""
    switches = sum(each.switches for each in entries)
    return (
        f"{counted(switches, 'switch', 'switches')} after {counted(len(entries), 'decision')}; "
        f"in force: {words.plain(entries[-1].order)}"
    )


def _columns(entries: Sequence[Entry]) -> dict[str, list[Any]]:
    return {
        "step": [each.step for each in entries],
        "measured_ms": [each.measured_ms for each in entries],
        "order": [words.plain(each.order) for each in entries],
        "reason": [words.plain(each.reason) for each in entries],
        "links": [
            ", ".join(f"{words.plain(way)} {gbps * 1e3:.0f} Mbit/s" for way, gbps in each.links_gbps.items())
            for each in entries
        ],
    }
