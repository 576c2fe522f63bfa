"""Findings: what makes steps longer than they need be, each with its cost and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import one_line

HALF = 0.5  # of a coarser finding's cost
MOST_CHARACTERS = 1000  # of a sentence: names in traces may be of any length


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. ``cost_ms`` estimates by how much a mean step would be shorter without it; ``ranks`` are to blame.

    ``sentence`` names the cause, who is to blame and the cost. ``stands_out`` says whether it is large enough to be
    told; then the sentence also says what to do.
    """

    cause: str
    cost_ms: float
    sentence: str
    ranks: tuple[int, ...] = ()
    stands_out: bool = True

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it. What does not stand out is measured, and nothing is said of it."""
        return {
            "cause": self.cause,
            "cost_ms": round(self.cost_ms, 6),
            "ranks": list(self.ranks),
            **({"sentence": self.sentence} if self.stands_out or self.cause == "clock_skew" else {}),
            "stands_out": self.stands_out,
        }


def superseded(
    found: Sequence[Finding], finer: Finding, *coarser: str, explains_ms: float = -1.0
) -> list[Finding]:
    """``found`` with ``finer``, in place of the coarser findings that it explains by half or more.

    ``explains_ms`` is how much of a step it explains, where that is not its cost.
    """
    return [*unexplained(found, finer, *coarser, explained_ms=max(explains_ms, finer.cost_ms)), finer]


def unexplained(
    found: Sequence[Finding], finer: Finding, *coarser: str, explained_ms: float
) -> list[Finding]:
    """``found`` without those of the coarser findings half of whose cost or more is in what ``finer`` explains."""
    return [
        one
        for one in found
        if one.cause not in coarser or not finer.stands_out or explained_ms < HALF * one.cost_ms
    ]


THE_BOTTLENECK = " is the bottleneck: "


def _of_its_weight(finding: Finding, *, first: bool) -> str:
    """Only what is told first is the bottleneck, and what does not stand out asks for nothing."""
    head, bottleneck, rest = finding.sentence.partition(THE_BOTTLENECK)
    if not bottleneck or (first and finding.stands_out):
        return finding.sentence
    if not finding.stands_out:
        rest = rest.partition(";")[0].rstrip(".") + "."
    return f"{head}: {rest}"


PLANS = " (headway optimize)"


def _without_plans(sentence: str) -> str:
    return sentence.replace(PLANS, " (headway optimize finds them from a trace of headway record)")


def ranked(found: Sequence[Finding], step_ms: float, *, plannable: bool = True) -> list[Finding]:
    """Findings in the order in which they are told: those that stand out first, the costliest before the others.

    None costs more than the step, and what a sentence quotes of the trace can break no line. Where a trace names no
    parameters it is not ``plannable``, and sentences do not send readers to where it would be refused.
    """
    ordered = sorted(found, key=lambda one: (not one.stands_out, -min(max(one.cost_ms, 0.0), step_ms)))
    told = []
    for place, one in enumerate(ordered):
        sentence = _of_its_weight(one, first=place == 0)
        sentence = sentence if plannable else _without_plans(sentence)
        cost_ms = min(max(one.cost_ms, 0.0), step_ms)
        told.append(replace(one, cost_ms=cost_ms, sentence=one_line(sentence, limit=MOST_CHARACTERS)))
    return told


def percent(share: float) -> str:
    """A share in words."""
    return f"{100 * share:.0f} %"


def milliseconds(value: float) -> str:
    """Milliseconds in words, to three digits."""
    return f"{value:.0f} ms" if value >= 99.5 else f"{value:.3g} ms"


def of_each_step(cost_ms: float, step_ms: float) -> str:
    """A cost in words."""
    return f"{milliseconds(cost_ms)} of each {milliseconds(step_ms)} step ({percent(cost_ms / step_ms)})"


def listed(ranks: tuple[int, ...] | list[int], most: int = 3) -> str:
    """Ranks in words."""
    shown = ", ".join(map(str, ranks[:most])) + (" and more" if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
