"""The HTML report: one file that works from disk and asks the network for nothing."""

from __future__ import annotations

import json
from pathlib import Path

from headway import files
from headway.diagnose import Diagnosis
from headway.report import palette
from headway.report.drawing import Drawing, draw
from headway.report.timeline import require_bokeh, timeline
from headway.trace.format import Trace
from headway.units import format_rate
from headway.version import __version__

MAX_PATH_ROWS = 200


def write_html(trace: Trace, diagnosis: Diagnosis, path: str | Path) -> None:
    """Write the report of ``diagnosis`` to ``path``.

    Raises UserError where Bokeh is not installed or the file cannot be written.
    """
    files.write_text(Path(path), render_html(trace, diagnosis))


def render_html(trace: Trace, diagnosis: Diagnosis) -> str:
    """The report as one HTML text. Whatever came from the trace is escaped."""
    require_bokeh()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("headway.report", "."), autoescape=True, undefined=StrictUndefined
    )
    drawing = draw(trace, diagnosis)
    breakdown = {rank: parts.rounded() for rank, parts in diagnosis.breakdown.items()}
    drawn_kinds = {box.kind for box in drawing.boxes}
    return environment.get_template("page.html.jinja").render(
        title=trace.path.resolve().name or "a trace",
        version=__version__,
        diagnosis=diagnosis,
        drawing=drawing,
        tiles=_tiles(trace, diagnosis),
        hosts=trace.hosts,
        breakdown=breakdown,
        parts=palette.PART_LABELS,
        colours=palette.PART_COLOURS,
        longest_ms=max(max((sum(row.values()) for row in breakdown.values()), default=0.0), 1e-9),
        kinds={kind: label for kind, label in palette.KIND_LABELS.items() if kind in drawn_kinds},
        kind_colours=palette.KIND_COLOURS,
        pending_colour=palette.PENDING_COLOUR,
        path_colour=palette.PATH_COLOUR,
        path=diagnosis.critical_path[:MAX_PATH_ROWS],
        path_left_out=max(len(diagnosis.critical_path) - MAX_PATH_ROWS, 0),
        path_ms=max(diagnosis.typical_step_ms, 1e-9),
        rate=format_rate,
        timeline_json=Markup(_timeline_json(drawing)),
        bokeh_js=Markup(_bokeh_js()),
    )


def _tiles(trace: Trace, diagnosis: Diagnosis) -> list[tuple[str, str]]:
    mean = {
        part: sum(getattr(parts, part) for parts in diagnosis.breakdown.values()) / len(diagnosis.breakdown)
        for part in palette.PART_LABELS
    }
    step_ms = max(diagnosis.step_ms, 1e-9)
    return [
        (f"{diagnosis.step_ms:.1f} ms", "mean step"),
        (f"{100 * mean['computation'] / step_ms:.0f} %", "computation"),
        (f"{100 * mean['exposed_communication'] / step_ms:.0f} %", "exposed communication"),
        (f"{100 * mean['straggler_wait'] / step_ms:.0f} %", "waiting for stragglers"),
        (f"{diagnosis.overlap_percent:.0f} %", "of communication hidden"),
        (str(trace.world_size), "ranks" if trace.world_size != 1 else "rank"),
        (str(len(diagnosis.steps)), "steps recorded" if len(diagnosis.steps) != 1 else "step recorded"),
    ]


def _timeline_json(drawing: Drawing) -> str:
    """The figure as JSON that cannot end the script element it stands in."""
    from bokeh.embed import json_item

    text = json.dumps(json_item(timeline(drawing)), ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _bokeh_js() -> str:
    """BokehJS inlined; only the part of it that draws figures."""
    from bokeh.resources import Resources

    return str(Resources(mode="inline", minified=True, components=["bokeh"]).render_js())
