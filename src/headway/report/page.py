"""Writes the HTML report: one file that works from disk and loads nothing from the network."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from headway import files
from headway.diagnosis import Diagnosis
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.communication import match
from headway.report import words
from headway.report.comparison_view import Baseline, comparison_values
from headway.report.drawing import (
    OPERATORS,
    Drawing,
    RankView,
    blamed_ranks,
    draw,
    rank_views,
    split_by_interest,
)
from headway.report.groups_picture import groups_picture
from headway.report.history import History, history, history_chart, rank_times, top_ms
from headway.report.job_view import job_values, page_title
from headway.report.pipeline_picture import pipeline_picture
from headway.report.templates import page_with_figures
from headway.report.timeline import Layout, page_data, require_bokeh, timeline, timeline_columns
from headway.trace.format import Trace
from headway.units import counted, format_bytes, format_rate

MAX_PATH_ROWS = 200
LEAST_PATH_SHARE = 0.005  # of the step: shorter pieces would be rows of 0 %
MAX_ROWS = 500  # in any other table
COMPACT_ABOVE = 16  # ranks: with more, bars stand side by side
SCRIPTS = (
    "page.js",
    "theme.js",
    "view.js",
    "ranks.js",
    "search.js",
    "controls.js",
    "main.js",
)  # in this order
HELP = (
    (("w", "+"), "zoom in"),
    (("s", "-"), "zoom out"),
    (("a", "←"), "move to the left"),
    (("d", "→"), "move to the right"),
    (("n",), "next step"),
    (("p",), "previous step"),
    (("0", "Home"), "back to the first view"),
    (("c",), "show or hide the critical path"),
    (("/",), "search"),
    (("Enter",), "next hit (in the search field)"),
    (("Shift", "Enter"), "previous hit (in the search field)"),
    (("Esc",), "end the search, or close this list"),
    (("?",), "show or hide this list"),
)


def write_html(
    trace: Trace, diagnosis: Diagnosis, path: str | Path, baseline: Baseline | None = None
) -> None:
    """Writes the report of ``diagnosis`` to ``path``, compared with ``baseline`` if given.

    Raises UserError if Bokeh is not installed or the file cannot be written.
    """
    files.write_text(Path(path), render_html(trace, diagnosis, baseline))


def render_html(trace: Trace, diagnosis: Diagnosis, baseline: Baseline | None = None) -> str:
    """Renders the report as one HTML text. All text from the trace is escaped and made printable."""
    require_bokeh()
    rows = match(trace, messages=True)
    drawing = draw(trace, diagnosis, rows=rows)
    past = history(rank_times(trace, diagnosis.steps, rows.where(~rows.inner)), diagnosis.steps)
    blamed = blamed_ranks(diagnosis)
    on_path = tuple({piece.rank for piece in diagnosis.critical_path})
    views = rank_views(drawing.ranks, trace.hosts, blamed, on_path, of_ranks=len(trace.events))
    layout = Layout(drawing.ranks, drawing.lanes, blamed[:8])
    columns, tables = timeline_columns(drawing, layout)
    drawn = tuple(step for step, _, _ in drawing.steps)
    name = trace.path.resolve().name or "a trace"
    return page_with_figures(
        "page.html.jinja",
        SCRIPTS,
        {
            "timeline": timeline(drawing, layout, columns, tables["kind"]),
            "history": history_chart(past, drawn),
        },
        page_data(drawing, tables, past, views, layout),
        **_words(trace, diagnosis),
        **_by_rank(trace, diagnosis, drawing, blamed),
        **job_values(diagnosis),
        **({"baseline": None} if baseline is None else comparison_values(baseline, diagnosis, name)),
        trace_name=name,
        title=page_title(None if diagnosis.details is None else diagnosis.details.job, name),
        drawing=drawing,
        pipeline=pipeline_picture(trace, diagnosis.typical_step),
        groups=groups_picture(diagnosis.averaging),
        waiting_colour=words.PASS_COLOURS[words.WAITING],
        operators=any(box.row == OPERATORS for box in drawing.boxes),
        pending=any(box.pending_ms > 0 for box in drawing.boxes),
        kinds=[kind for kind in words.KIND_LABELS if kind in tables["kind"]],
        past=past,
        history_hint=_history_hint(past),
        drawn_at={step: at for at, step in enumerate(drawn)},
        views=views,
        blamed=blamed,
        blamed_for=_blamed_for(diagnosis, blamed),
        blamed_view=_blamed_view(views, blamed),
        besides=[
            finding.sentence
            for finding in diagnosis.findings
            if finding.stands_out and finding.sentence.rstrip(".") not in diagnosis.verdict
        ],
    )


def _words(trace: Trace, diagnosis: Diagnosis) -> dict[str, Any]:
    """The template's values and formatting functions, except the parts by rank and the timeline."""
    clock = diagnosis.clock
    return {
        "diagnosis": diagnosis,
        "tiles": _tiles(trace, diagnosis),
        "hosts": trace.hosts,
        "parts": PARTS,
        "links": sorted(diagnosis.links, key=lambda link: -link.utilisation),
        **_path(diagnosis),
        "step_ms": max(diagnosis.step_ms, 1e-9),
        "next_command": _next_command(trace),
        "clock_ranks": sorted(clock),
        "vaguest": max(clock, key=lambda rank: clock[rank].uncertainty_us, default=None),
        "max_rows": MAX_ROWS,
        "help": HELP,
        "duration": words.duration,
        "count": counted,
        "cut_text": words.plain,
        "rate": format_rate,
        "part_label": words.part_label,
        "short_label": words.short_label,
        "part_colour": lambda part: words.PART_COLOURS.get(part, words.UNKNOWN_COLOUR),
        "kind_label": words.kind_label,
        "kind_colour": words.kind_colour,
        "pending_colour": words.PENDING_COLOUR,
        "size": format_bytes,
    }


def _path(diagnosis: Diagnosis) -> dict[str, Any]:
    """The listed pieces of the critical path with their indices: those of at least half a percent of the step."""
    whole_ms = max(diagnosis.typical_step_ms, 1e-9)
    pieces = list(enumerate(diagnosis.critical_path))
    listed = [(at, piece) for at, piece in pieces if piece.ms >= LEAST_PATH_SHARE * whole_ms][:MAX_PATH_ROWS]
    return {
        "path": listed,
        "path_left_out": len(pieces) - len(listed),
        "path_left_out_ms": sum(piece.ms for _, piece in pieces) - sum(piece.ms for _, piece in listed),
        "path_ms": whole_ms,
    }


def _next_command(trace: Trace) -> str:
    """The suggested next command; empty if the trace has no parameters, which a plan needs."""
    return f"headway optimize {shlex.quote(str(trace.path))} -o plan.yaml" if trace.model.parameters else ""


def _by_rank(trace: Trace, diagnosis: Diagnosis, drawing: Drawing, blamed: tuple[int, ...]) -> dict[str, Any]:
    """The template's values for the parts of each rank's mean step, and which ranks are drawn and listed first."""
    breakdown = {rank: parts.rounded() for rank, parts in diagnosis.breakdown.items()}
    first, following = split_by_interest(diagnosis.breakdown, blamed)
    longest_ms = max(max((sum(row.values()) for row in breakdown.values()), default=0.0), 1e-9)
    bars = [rank for rank in drawing.ranks if rank in breakdown]
    every = max(-(-len(bars) // 32), 1)
    named = set(bars[::every]) | (set(blamed[:8]) & set(bars))
    near = {rank: at for at, rank in enumerate(bars) if rank in blamed[:8]}
    close = {
        bars[at + by] for at in near.values() for by in range(1 - every, every) if 0 <= at + by < len(bars)
    }
    scale = words.scale(longest_ms)
    return {
        "breakdown": breakdown,
        "mean": _mean(diagnosis),
        "longest_ms": longest_ms,
        "scale": scale,
        "part_headers": [f"#{words.part_label(part)}" for part in PARTS],
        "first_ranks": first,
        "other_ranks": following[:MAX_ROWS],
        "unlisted_ranks": max(len(following) - MAX_ROWS, 0),
        "bar_ranks": bars,
        "bar_labels": named - (close - set(near)),
        "compact": len(bars) > COMPACT_ABOVE,
    }


def _mean(diagnosis: Diagnosis) -> dict[str, float]:
    ranks = diagnosis.breakdown.values()
    return {part: sum(getattr(parts, part) for parts in ranks) / len(ranks) for part in PARTS}


def _tiles(trace: Trace, diagnosis: Diagnosis) -> list[tuple[str, str]]:
    mean = _mean(diagnosis)
    step_ms = max(diagnosis.step_ms, 1e-9)
    return [
        (words.duration(diagnosis.step_ms), "mean step"),
        (f"{100 * mean['computation'] / step_ms:.0f} %", "computation"),
        (f"{100 * mean['exposed_communication'] / step_ms:.0f} %", "exposed communication"),
        (f"{100 * mean['straggler_wait'] / step_ms:.0f} %", "waiting for other ranks, mean over ranks"),
        (f"{diagnosis.overlap_percent:.0f} %", "of communication hidden"),
        _ranks_tile(trace),
        (f"{len(diagnosis.steps):,}", "steps recorded" if len(diagnosis.steps) != 1 else "step recorded"),
    ]


def _ranks_tile(trace: Trace) -> tuple[str, str]:
    """The number of ranks, or which ranks the trace has if some are missing."""
    present, world_size = len(trace.events), trace.world_size
    if present == world_size:
        return f"{world_size:,}", "ranks" if world_size != 1 else "rank"
    if present == 1:
        return f"rank {next(iter(trace.events))}", f"alone, of {world_size:,}"
    which = words.runs(trace.events)
    return f"{which or f'{present:,}'} of {world_size:,}", "ranks in this trace"


def _history_hint(past: History) -> str:
    parts = [
        "All recorded steps: bars show the mean over ranks, dark caps reach from the median rank to the slowest.",
        "Click a step on the blue background to show it in the timeline below.",
    ]
    if past.steps_a_bar > 1:
        parts.insert(1, f"Each bar shows the longest of {past.steps_a_bar} steps.")
    if past.outlying:
        parts.append("▼ marks steps that stand out.")
    top = top_ms(past)
    if any(bar.max_ms > top for bar in past.bars):
        parts.append(f"Bars longer than {words.duration(top)} are cut off.")
    return " ".join(parts)


def _blamed_for(diagnosis: Diagnosis, blamed: tuple[int, ...]) -> str:
    """Says what the first of ``blamed`` did."""
    if not blamed:
        return ""
    straggler = next((late for late in diagnosis.stragglers if late.rank == blamed[0]), None)
    if straggler is not None:
        return f"delays the others by {words.duration(straggler.cost_ms)} of each step"
    finding = next(
        finding for finding in diagnosis.findings if finding.stands_out and blamed[0] in finding.ranks
    )
    return (
        f"is to blame for {words.duration(finding.cost_ms)} of each step ({finding.cause.replace('_', ' ')})"
    )


def _blamed_view(views: tuple[RankView, ...], blamed: tuple[int, ...]) -> int:
    """The index of the view that shows the worst straggler best."""
    holding = [at for at, view in enumerate(views) if blamed and blamed[0] in view.ranks]
    return holding[1] if len(holding) > 1 else 0
