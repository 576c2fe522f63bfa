"""The page of a search: the step from what was recorded to the plan, what is left of it, and the plans compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.optimization.candidate import Candidate
from headway.optimization.explanation import COMMUNICATION, COMPUTATION, REST, UPDATE, WAITING, Explanation
from headway.optimization.result import SearchResult
from headway.report import words
from headway.report.templates import own_file, template
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
"""The parts of a critical path, with those of the report whose colours they have."""


@dataclass(frozen=True, slots=True)
class PathBar:
    """A step as a bar: its critical path in ms, by part, and what was chosen to come to it."""

    name: str
    parts_ms: Mapping[str, float]
    saved_ms: float | None = None
    where: str = ""

    @property
    def step_ms(self) -> float:
        """The whole bar."""
        return sum(self.parts_ms.values())


def path_bars(explained: Explanation) -> tuple[PathBar, ...]:
    """The recorded step, and that after each choice of the plan, the last of which is the plan's.

    Each bar is the next one and what the choice of that saved, part by part.
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
    trace_name: str, best: Candidate, found: SearchResult, explained: Explanation | None, answer: str
) -> str:
    """The page as one HTML text that loads nothing, with ``answer`` at its top.

    Whatever came from the trace is escaped.
    """
    from markupsafe import Markup

    bars = () if explained is None else path_bars(explained)
    shown = found.candidates[:MAX_PLANS]
    for_other_scripts = found.for_other_scripts[:MAX_PLANS]
    has_bound = found.can_rank and found.bound is not None and best.is_runnable and not best.changes_training
    return template("plan.html.jinja").render(
        title=trace_name,
        version=__version__,
        best=best,
        answer=answer,
        tiles=_tiles(best, found, has_bound=has_bound),
        distance=found.bound.distance(best.predicted_ms) if found.bound is not None and has_bound else "",
        explained=explained,
        bars=bars,
        bound_ms=found.bound_ms if has_bound else None,
        longest_bar_ms=max((bar.step_ms for bar in bars), default=1.0),
        parts=[part for part in PARTS if any(part in bar.parts_ms for bar in bars)],
        colour=lambda part: words.PART_COLOURS[PARTS[part]],
        like=[each.short_name for each in found.like(best)],
        plans=shown,
        for_other_scripts=for_other_scripts,
        left_out=len(found.candidates) - len(shown),
        longest_plan_ms=max(each.predicted_ms + each.uncertainty_ms for each in (*shown, *for_other_scripts)),
        found=found,
        duration=words.duration,
        count=counted,
        memory=lambda each: "" if each.peak_bytes is None else format_bytes(each.peak_bytes),
        css=Markup(own_file("page.css")),
    )


def _tiles(best: Candidate, found: SearchResult, *, has_bound: bool) -> list[tuple[str, str]]:
    tiles = [
        (words.duration(found.baseline_ms), "a step, as recorded"),
        (f"{words.duration(best.predicted_ms)} ± {words.duration(best.uncertainty_ms)}", "predicted"),
        (f"{best.expected.speedup:.2f}x", "as fast"),
    ]
    if has_bound:
        tiles.append((words.duration(found.bound_ms), "the bound of any plan"))
    return [*tiles, (str(found.replayed), "plans replayed")]
