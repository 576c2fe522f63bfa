"""Renders the HTML page of a plan search: how the plan shortens the recorded step, and all plans compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.optimization.candidate import Candidate
from headway.optimization.explanation import COMMUNICATION, COMPUTATION, REST, UPDATE, WAITING, Explanation
from headway.optimization.result import SearchResult
from headway.report import words
from headway.report.templates import package_file, template
from headway.units import counted, format_bytes
from headway.version import __version__

MAX_PLANS = 40
PARTS = {
    COMPUTATION: "computation",
    COMMUNICATION: "exposed_communication",
    WAITING: "straggler_wait",
    UPDATE: "optimizer",
    REST: "rest",
}
"""Maps the parts of a critical path to the parts of the report with the same colour."""


@dataclass(frozen=True, slots=True)
class PathBar:
    """A step as a bar: its critical path by part in ms, and the choice that led to it."""

    name: str
    parts_ms: Mapping[str, float]
    saved_ms: float | None = None
    where: str = ""

    @property
    def step_ms(self) -> float:
        """The length of the bar."""
        return sum(self.parts_ms.values())


def path_bars(explained: Explanation) -> tuple[PathBar, ...]:
    """The recorded step, then the step after each choice of the plan.

    Computed backwards from the final plan: each bar is the next bar plus the time saved by the choice between them.
    """
    bars: list[PathBar] = []
    parts = dict(explained.after.parts_ms)
    for choice in reversed(explained.choices):
        bars.append(PathBar(choice.name, _in_order(parts), choice.saved_ms, choice.where))
        for part, ms in choice.saved.parts_ms.items():
            parts[part] = parts.get(part, 0.0) + ms
    bars.append(PathBar("as recorded", _in_order(parts)))
    return tuple(reversed(bars))


def _in_order(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: ms for part in PARTS if (ms := parts.get(part, 0.0)) > 0}


def plan_page(
    trace_name: str, best: Candidate, search: SearchResult, explained: Explanation | None, answer: str
) -> str:
    """Renders the page as one self-contained HTML text, with ``answer`` at the top.

    All text from the trace is escaped.
    """
    from markupsafe import Markup

    bars = () if explained is None else path_bars(explained)
    shown = search.candidates[:MAX_PLANS]
    for_other_scripts = search.for_other_scripts[:MAX_PLANS]
    has_bound = (
        search.can_rank and search.bound is not None and best.is_runnable and not best.changes_training
    )
    return template("plan.html.jinja").render(
        title=trace_name,
        version=__version__,
        best=best,
        answer=answer,
        tiles=_tiles(best, search, has_bound=has_bound),
        distance=search.bound.distance(best.predicted_ms) if search.bound is not None and has_bound else "",
        explained=explained,
        bars=bars,
        bound_ms=search.bound_ms if has_bound else None,
        longest_bar_ms=max((bar.step_ms for bar in bars), default=1.0),
        parts=[part for part in PARTS if any(part in bar.parts_ms for bar in bars)],
        colour=lambda part: words.PART_COLOURS[PARTS[part]],
        like=[candidate.short_name for candidate in search.like(best)],
        plans=shown,
        for_other_scripts=for_other_scripts,
        left_out=len(search.candidates) - len(shown),
        longest_plan_ms=max(plan.predicted_ms + plan.uncertainty_ms for plan in (*shown, *for_other_scripts)),
        search=search,
        duration=words.duration,
        count=counted,
        memory=lambda candidate: "" if candidate.peak_bytes is None else format_bytes(candidate.peak_bytes),
        css=Markup(package_file("page.css")),
    )


def _tiles(best: Candidate, search: SearchResult, *, has_bound: bool) -> list[tuple[str, str]]:
    tiles = [
        (words.duration(search.baseline_ms), "a step, as recorded"),
        (f"{words.duration(best.predicted_ms)} ± {words.duration(best.uncertainty_ms)}", "predicted"),
        (f"{best.expected.speedup:.2f}x", "as fast"),
    ]
    if has_bound:
        tiles.append((words.duration(search.bound_ms), "lower bound of all plans"))
    return [*tiles, (str(search.replayed), "plans simulated")]
