"""A page that draws what was decided while a job trained: how long steps took, under which plan, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
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
    places = _places(shown)
    orders = list(
        dict.fromkeys(name for each in shown for name in (each.before, *each.predicted_ms, each.order))
    )
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(orders)}
    plot = figure(
        height=420, sizing_mode="stretch_width", y_axis_label="ms a step",
        x_axis_label="step" if starts(shown)[-1] == 0 else "step, of all starts one after the other",
        title=summary(entries), tools="xpan,xwheel_zoom,reset,save",
    )  # fmt: skip
    measured: list[DataRenderer] = []
    for name in orders:
        expected = [each.predicted_ms.get(name, float("nan")) for each in shown]
        plot.line(places, expected, color=colours[name], alpha=0.45, line_dash="dashed")
        own = [(each, place) for each, place in zip(shown, places, strict=True) if each.before == name]
        source = ColumnDataSource(_columns(own))
        if own:
            points = plot.scatter(
                "place", "measured_ms", source=source, size=7, color=colours[name],
                legend_label=words.plain(name),
            )  # fmt: skip
            measured.append(points)
    for each, place in zip(shown, places, strict=True):
        if each.switches:
            plot.add_layout(
                Span(location=place + 0.5, dimension="height", line_color=palette.MUTED, line_dash="dotted")
            )
    tips = [
        ("step", "@step"),
        ("workers", "@workers"),
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
    again = starts(entries)[-1]
    return (
        f"{counted(switches, 'switch', 'switches')} after {counted(len(entries), 'decision')}"
        + (f"; started again {counted(again, 'time')}" if again else "")
        + f"; in force: {words.plain(entries[-1].order)}"
    )


def starts(entries: Sequence[Entry]) -> list[int]:
    """In which start of the job each was taken, from 0 on: what began again counts its steps anew."""
    found = [0]
    for before, each in pairwise(entries):
        began = (each.attempt, each.workers) != (before.attempt, before.workers)
        found.append(found[-1] + began)
    return found


def _places(entries: Sequence[Entry]) -> list[int]:
    """Where each is drawn: by its step, and those of each start behind all of the one before."""
    places: list[int] = []
    for _, own in groupby(zip(starts(entries), entries, strict=True), key=lambda pair: pair[0]):
        behind = max(places, default=0)
        places += [behind + each.step for _, each in own]
    return places


def _columns(drawn: Sequence[tuple[Entry, int]]) -> dict[str, list[Any]]:
    entries = [each for each, _ in drawn]
    return {
        "place": [place for _, place in drawn],
        "step": [each.step for each in entries],
        "workers": [str(each.workers or "?") for each in entries],
        "measured_ms": [each.measured_ms for each in entries],
        "order": [words.plain(each.order) for each in entries],
        "reason": [words.plain(each.reason) for each in entries],
        "links": [
            ", ".join(f"{words.plain(way)} {gbps * 1e3:.0f} Mbit/s" for way, gbps in each.links_gbps.items())
            for each in entries
        ],
    }
