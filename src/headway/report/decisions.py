"""A page that draws what was decided while a job trained: how long steps took, under which plan, and why."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from headway.report import words
from headway.report.templates import page_with_figures
from headway.report.timeline import TIP_STYLE, dress, require_bokeh
from headway.units import counted, format_rate

if TYPE_CHECKING:
    from bokeh.models.renderers import DataRenderer

    from headway.strategies.decisions import Entry

MAX_DRAWN = 20_000
MAX_LISTED = 200
MAX_LINKS = 8
SCRIPTS = ("page.js", "theme.js", "decisions.js")


def decisions_page(entries: Sequence[Entry], name: str = "") -> str:
    """The page of the file ``name`` as one text that loads nothing; of a long run the last ``MAX_DRAWN`` are drawn.

    Raises UserError where Bokeh is not installed.
    """
    require_bokeh()
    numbers = starts(entries)
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
        dict.fromkeys(name for each in shown for name in (each.before, *each.predicted_ms, each.order))
    )
    colours = {name: words.GROUP_COLOURS[at % len(words.GROUP_COLOURS)] for at, name in enumerate(orders)}
    plot = figure(
        name="decisions", height=380, sizing_mode="stretch_width", y_axis_label="ms a step",
        x_axis_label="step" if starts(shown)[-1] == 0 else "step, of all starts one after the other",
        tools="xpan,xwheel_zoom,reset,save",
    )  # fmt: skip
    measured: list[DataRenderer] = []
    for name in orders:
        expected = [each.predicted_ms.get(name, float("nan")) for each in shown]
        plot.line(places, expected, color=colours[name], alpha=0.6, line_dash="dashed")
        own = [(each, place) for each, place in zip(shown, places, strict=True) if each.before == name]
        source = ColumnDataSource(_columns(own))
        if own:
            points = plot.scatter(
                "place", "measured_ms", source=source, size=7, color=colours[name],
                legend_label=words.plain(name, 60),
            )  # fmt: skip
            measured.append(points)
    for each, place in zip(shown, places, strict=True):
        if each.switches:
            plot.add_layout(
                Span(location=place + 0.5, dimension="height", line_color=words.MUTED, line_dash="dotted")
            )
    tip = f"""<div style="{TIP_STYLE}"><b>step @step</b>, @workers workers<br>took @measured_ms{{0.0}} ms<br>
decided @order<br>as @reason<br><span style="color:var(--muted)">@links</span></div>"""
    plot.add_tools(HoverTool(tooltips=tip, renderers=measured, visible=False))
    plot.toolbar.logo = None
    plot.xaxis.major_label_policy = NoOverlap(min_distance=12)
    dress(plot)
    if plot.legend:
        plot.add_layout(plot.legend[0], "below")
        plot.legend.update(
            location="top_left", title="in force (dashed: expected)", label_text_color=words.INK,
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
    """What a step of what was chosen was expected to take."""
    expected_ms = entry.predicted_ms.get(entry.order)
    return "" if expected_ms is None else words.duration(expected_ms)


def summary(entries: Sequence[Entry]) -> str:
    """In one line: how often the order was changed, and which is in force."""
    switches = sum(entry.switches for entry in entries)
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
        "step": [entry.step for entry in entries],
        "workers": [str(each.workers or "?") for each in entries],
        "measured_ms": [each.measured_ms for each in entries],
        "order": [words.plain(each.order) for each in entries],
        "reason": [words.plain(each.reason) for each in entries],
        "links": [_links(each) for each in entries],
    }


def _links(entry: Entry) -> str:
    ways = [f"{words.plain(way, 20)} {format_rate(gbps)}" for way, gbps in entry.links_gbps.items()]
    return ", ".join(ways[:MAX_LINKS]) + (
        f" and {len(ways) - MAX_LINKS} more" if len(ways) > MAX_LINKS else ""
    )
