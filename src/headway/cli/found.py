"""The answer of a search as text and as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from headway.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.optimization.candidate import Candidate
    from headway.optimization.result import SearchResult
    from headway.planning.bound import StepBound

MOST_NAMED = 2
FOLLOWED_BY = ("headway run", "headway.parallelize")


def search_document(found: SearchResult, best: Candidate) -> dict[str, Any]:
    """What was found, and what is to be said of ``best``, which is taken."""
    return {
        "baseline_ms": found.baseline_ms,
        "recorded_ms": found.baseline_ms,
        "replayed_ms": found.replayed_ms,
        "plans": [
            {
                "name": candidate.name,
                "predicted_ms": candidate.predicted_ms,
                "uncertainty_ms": candidate.uncertainty_ms,
                "speedup": candidate.expected.speedup,
                "peak_bytes": candidate.peak_bytes,
                "dominated": found.dominated(candidate),
                "followed_by": FOLLOWED_BY[candidate.recut is not None],
                "changes": list(candidate.changes),
                "changes_training": candidate.changes_training,
            }
            for candidate in found.candidates
        ],
        "excluded": [
            {"name": each.name, "predicted_ms": each.predicted_ms, "peak_bytes": each.peak_bytes}
            for each in found.excluded
        ],
        "bound_ms": found.bound_ms,
        "bound": None if found.bound is None else bound_document(found.bound),
        "searched": len(found.candidates),
        "pruned": found.pruned,
        "not_searched": found.unseen,
        "cut_short": found.cut_short,
        "elapsed_s": found.elapsed_s,
        "like_best": [candidate.name for candidate in found.like(best)],
        "may_gain_nothing": best.expected.may_gain_nothing,
        "changes_training": best.changes_training,
        "note": found.note,
    }


def searched(found: SearchResult) -> str:
    """How much was looked at, and how much was not and why."""
    said = f"{len(found.candidates)} plans replayed in {found.elapsed_s:.1f} s"
    if found.pruned:
        said += f", {found.pruned} left out that their bounds say are slower"
    if found.unseen:
        said += f"; {found.unseen} were not looked at, as the budget was used up"
    elif found.cut_short:
        said += "; the budget was used up before all plans were made"
    return f"{said}."


def doubts_of(best: Candidate, like: Sequence[Candidate]) -> list[str]:
    """What must be said of the best plan: that it may gain nothing, and which others may be as good."""
    said = []
    if best.changed and best.expected.is_slower:
        said.append("The job would be slower with this plan, by more than ±: leave it as it is.")
    elif best.changed and best.expected.may_gain_nothing:
        said.append("The gain is no more than ±: the job may be no faster with this plan.")
    if like:
        names = " | ".join(each.name for each in like[:MOST_NAMED])
        more = f" | and {len(like) - MOST_NAMED} more" if len(like) > MOST_NAMED else ""
        said.append(f"Within ±, these plans may be as good: {names}{more}.")
    return said


def bound_document(bound: StepBound) -> dict[str, Any]:
    """The bound as a document: what binds, why, and what each part leaves of a step by itself."""
    parts_ms = {name: part_ns / 1e6 for name, part_ns in bound.parts_ns.items()}
    return {"binds": bound.binds, "reason": bound.reason, "parts_ms": parts_ms}


def plans_table(found: SearchResult) -> Table:
    """The ranked candidates, with the bound that no plan can beat."""
    from headway.strategies.registry import plugin_of

    table = Table("plan", "predicted ms", "± ms", "speedup", "ratio to bound", "memory", "changes")
    for candidate in found.candidates:
        has_bound = candidate.recut is None and not candidate.changes_training
        table.add_row(
            candidate.name + " †" * (candidate.recut is not None) + " ‡" * bool(candidate.changes_training),
            f"{candidate.predicted_ms:.1f}",
            f"{candidate.uncertainty_ms:.1f}",
            f"{candidate.expected.speedup:.2f}x",
            f"{candidate.predicted_ms / found.bound_ms:.2f}" if has_bound else "",
            _memory(found, candidate),
            "; ".join(candidate.changes),
        )
    recorded, replayed = f"recorded {found.baseline_ms:.1f} ms", f"replayed {found.replayed_ms:.1f} ms"
    table.caption = f"{recorded}, {replayed}, bound {found.bound_ms:.1f} ms"
    if any(map(found.dominated, found.candidates)):
        table.caption += "; * another plan is no slower and needs no more memory"
    if any(candidate.recut for candidate in found.candidates):
        table.caption += "; † only with headway.parallelize in the script, without a bound"
    if any(candidate.peak_is_rough and candidate.peak_bytes is not None for candidate in found.candidates):
        table.caption += "; ~ roughly, as memory was not watched"
    permitted = {permission for candidate in found.candidates for permission in candidate.permissions}
    if permitted:
        from headway.plan.permissions import changes_in_words

        table.caption += (
            f"; ‡ changes what is trained, as was allowed ({changes_in_words(permitted)}), without a bound"
        )
    if any(plugin_of(candidate.strategy).has_horizon for candidate in found.candidates):
        table.caption += "; of ranks that do not wait for each other, the mean iteration"
    return table


def _memory(found: SearchResult, candidate: Candidate) -> str:
    """The most that a rank holds, marked where another plan is better in memory or time and as good in the other."""
    if candidate.peak_bytes is None:
        return ""
    rough = "~" if candidate.peak_is_rough else ""
    return rough + format_bytes(candidate.peak_bytes) + (" *" if found.dominated(candidate) else "")
