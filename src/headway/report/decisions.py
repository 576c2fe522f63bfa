"""Draws the HTML page of the decisions taken during training: step times, plans in force, and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from headway.report import words
from headway.report.templates import page_with_figures
from headway.report.timeline import TIP_STYLE, apply_style, require_bokeh
from headway.units import counted, format_rate

if TYPE_CHECKING:
    from bokeh.models.renderers import DataRenderer

    from headway.strategies.decisions import Entry

MAX_DRAWN = 20_000
MAX_LISTED = 200
MAX_LINKS = 8
SCRIPTS = ("page.js", "theme.js", "decisions.js")


def decisions_page(entries: Sequence[Entry], name: str = "") -> str:
    """Renders the decisions of the file ``name`` as one self-contained HTML text, drawing the last ``MAX_DRAWN``.

    Raises UserError if Bokeh is not installed.
    """
    require_bokeh()
    numbers = start_numbers(entries)
    switches = [(entry, start) for entry, start in zip(entries, numbers, strict=True) if entry.switches]
    listed = list(zip(entries, numbers, strict=True))[-MAX_LISTED:]
    return page_with_figures(
        "decisions.html.jinja",
        SCRIPTS,
        {"decisions": _figure(entries[-MAX_DRAWN:])},
        {},
        file_name=name,
        summary=summary(entries),
        switches=switches[-MAX_LISTED:],
        switches_left_out=max(len(switches) - MAX_LISTED, 0),
        listed=listed,
        listed_left_out=len(entries) - len(listed),
        drawn=min(len(entries), MAX_DRAWN),
        restarted=numbers[-1] > 0,
        tiles=_tiles(entries, len(switches)),
        duration=words.duration,
        count=counted,
        expected=_expected,
        links=_links,
    )


def _figure(shown: Sequence[Entry]) -> Any:
    from bokeh.models import ColumnDataSource, HoverTool, NoOverlap
    from bokeh.models.annotations import Span
    from bokeh.plotting import figure

    places = _places(shown)
    orders = list(
        dict.fromkeys(name for entry in shown for name in (entry.before, *entry.predicted_ms, entry.order))
    )
    colours = {name: words.GROUP_COLOURS[at % len(words.GROUP_COLOURS)] for at, name in enumerate(orders)}
    plot = figure(
        name="decisions", height=380, sizing_mode="stretch_width", y_axis_label="ms per step",
        x_axis_label="step" if start_numbers(shown)[-1] == 0 else "step, with all starts in sequence",
        tools="xpan,xwheel_zoom,reset,save",
    )  # fmt: skip
    measured: list[DataRenderer] = []
    for name in orders:
        expected = [entry.predicted_ms.get(name, float("nan")) for entry in shown]
        plot.line(places, expected, color=colours[name], alpha=0.6, line_dash="dashed")
        in_force = [
            (entry, place) for entry, place in zip(shown, places, strict=True) if entry.before == name
        ]
        source = ColumnDataSource(_columns(in_force))
        if in_force:
            points = plot.scatter(
                "place", "measured_ms", source=source, size=7, color=colours[name],
                legend_label=words.plain(name, 60),
            )  # fmt: skip
            measured.append(points)
    for entry, place in zip(shown, places, strict=True):
        if entry.switches:
            plot.add_layout(
                Span(location=place + 0.5, dimension="height", line_color=words.MUTED, line_dash="dotted")
            )
    tip = f"""<div style="{TIP_STYLE}"><b>step @step</b>, @workers workers<br>measured @measured_ms{{0.0}} ms<br>
decision: @order<br>reason: @reason<br><span style="color:var(--muted)">@links</span></div>"""
    plot.add_tools(HoverTool(tooltips=tip, renderers=measured, visible=False))
    plot.toolbar.logo = None
    plot.xaxis.major_label_policy = NoOverlap(min_distance=12)
    apply_style(plot)
    if plot.legend:
        plot.add_layout(plot.legend[0], "below")
        plot.legend.update(
            location="top_left", title="in force (dashed: predicted)", label_text_color=words.INK,
            title_text_color=words.MUTED, background_fill_color="white", border_line_color=words.RULE,
            label_text_font=words.FONT, title_text_font=words.FONT,
        )  # fmt: skip
    return plot


def _tiles(entries: Sequence[Entry], switches: int) -> list[tuple[str, str]]:
    last = entries[-1]
    return [
        (f"{len(entries):,}", "decisions" if len(entries) != 1 else "decision"),
        (f"{switches:,}", "switches" if switches != 1 else "switch"),
        (words.duration(last.measured_ms), f"a step, up to step {last.step}"),
        *([(f"{last.workers:,}", "workers" if last.workers != 1 else "worker")] if last.workers else []),
    ]


def _expected(entry: Entry) -> str:
    """The predicted step time of the chosen plan."""
    expected_ms = entry.predicted_ms.get(entry.order)
    return "" if expected_ms is None else words.duration(expected_ms)


def summary(entries: Sequence[Entry]) -> str:
    """One line: the number of switches, and the plan in force."""
    switches = sum(entry.switches for entry in entries)
    again = start_numbers(entries)[-1]
    return (
        f"{counted(switches, 'switch', 'switches')} after {counted(len(entries), 'decision')}"
        + (f"; restarted {counted(again, 'time')}" if again else "")
        + f"; in force: {words.plain(entries[-1].order)}"
    )


def start_numbers(entries: Sequence[Entry]) -> list[int]:
    """The number of the job's start in which each decision was taken, from 0; a restart counts steps from 0 again."""
    numbers = [0]
    for before, entry in pairwise(entries):
        began = (entry.attempt, entry.workers) != (before.attempt, before.workers)
        numbers.append(numbers[-1] + began)
    return numbers


def _places(entries: Sequence[Entry]) -> list[int]:
    """The x position of each decision: its step, with each start placed after the previous one."""
    places: list[int] = []
    for _, of_start in groupby(zip(start_numbers(entries), entries, strict=True), key=lambda pair: pair[0]):
        behind = max(places, default=0)
        places += [behind + entry.step for _, entry in of_start]
    return places


def _columns(drawn: Sequence[tuple[Entry, int]]) -> dict[str, list[Any]]:
    entries = [entry for entry, _ in drawn]
    return {
        "place": [place for _, place in drawn],
        "step": [entry.step for entry in entries],
        "workers": [str(entry.workers or "?") for entry in entries],
        "measured_ms": [entry.measured_ms for entry in entries],
        "order": [words.plain(entry.order) for entry in entries],
        "reason": [words.plain(entry.reason) for entry in entries],
        "links": [_links(entry) for entry in entries],
    }


def _links(entry: Entry) -> str:
    ways = [f"{words.plain(way, 20)} {format_rate(gbps)}" for way, gbps in entry.links_gbps.items()]
    return ", ".join(ways[:MAX_LINKS]) + (
        f" and {len(ways) - MAX_LINKS} more" if len(ways) > MAX_LINKS else ""
    )
