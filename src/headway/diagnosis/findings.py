"""Findings: the causes of long steps, with cost and advice. Orders them and words their common phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import one_line

HALF = 0.5  # of a coarser finding's cost
MOST_CHARACTERS = 1000  # per sentence: names in traces may have any length


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of long steps. ``cost_ms`` estimates how much shorter a mean step would be without it.

    ``ranks`` are those to blame. ``sentence`` names the cause, its cost and what to do. ``stands_out`` says whether the
    finding is large enough to be reported.
    """

    cause: str
    cost_ms: float
    sentence: str
    ranks: tuple[int, ...] = ()
    stands_out: bool = True

    def to_document(self) -> dict[str, Any]:
        """The JSON object of ``headway diagnose --json``. A finding that does not stand out has no sentence."""
        return {
            "cause": self.cause,
            "cost_ms": round(self.cost_ms, 6),
            "ranks": list(self.ranks),
            **({"sentence": self.sentence} if self.stands_out or self.cause == "clock_skew" else {}),
            "stands_out": self.stands_out,
        }


def supersede(
    findings: Sequence[Finding], finer: Finding, *coarser: str, explains_ms: float = -1.0
) -> list[Finding]:
    """Adds ``finer`` to ``findings``, and drops the ``coarser`` causes if it explains at least half of their cost.

    ``explains_ms`` is how much of a step it explains, if that is more than its cost.
    """
    return [*drop_explained(findings, finer, *coarser, explained_ms=max(explains_ms, finer.cost_ms)), finer]


def drop_explained(
    findings: Sequence[Finding], finer: Finding, *coarser: str, explained_ms: float
) -> list[Finding]:
    """Drops the ``coarser`` causes from ``findings`` if ``finer`` explains at least half of their cost."""
    return [
        finding
        for finding in findings
        if finding.cause not in coarser or not finer.stands_out or explained_ms < HALF * finding.cost_ms
    ]


THE_BOTTLENECK = " is the bottleneck: "


def _tone_down(finding: Finding, *, first: bool) -> str:
    """The sentence without "the bottleneck" unless it comes first, and without advice unless it stands out."""
    head, bottleneck, rest = finding.sentence.partition(THE_BOTTLENECK)
    if not bottleneck or (first and finding.stands_out):
        return finding.sentence
    if not finding.stands_out:
        rest = rest.partition(";")[0].rstrip(".") + "."
    return f"{head}: {rest}"


PLANS = " (headway optimize)"


def _without_plan_hint(sentence: str) -> str:
    return sentence.replace(PLANS, " (headway optimize needs a trace from headway record)")


def ordered_findings(findings: Sequence[Finding], step_ms: float, *, plannable: bool = True) -> list[Finding]:
    """Sorts findings for the report: those that stand out first, then by cost.

    Costs are limited to the step, and sentences to one line. Without ``plannable`` (the trace has no parameters),
    sentences do not recommend ``headway optimize``, which would refuse the trace.
    """
    ordered = sorted(
        findings, key=lambda finding: (not finding.stands_out, -min(max(finding.cost_ms, 0.0), step_ms))
    )
    result = []
    for place, finding in enumerate(ordered):
        sentence = _tone_down(finding, first=place == 0)
        sentence = sentence if plannable else _without_plan_hint(sentence)
        cost_ms = min(max(finding.cost_ms, 0.0), step_ms)
        result.append(replace(finding, cost_ms=cost_ms, sentence=one_line(sentence, limit=MOST_CHARACTERS)))
    return result


def percent(share: float) -> str:
    """Formats a share as a percentage: ``12 %``."""
    return f"{100 * share:.0f} %"


def milliseconds(value: float) -> str:
    """Formats milliseconds to three digits: ``1.23 ms``."""
    return f"{value:.0f} ms" if value >= 99.5 else f"{value:.3g} ms"


def of_each_step(cost_ms: float, step_ms: float) -> str:
    """Formats a cost: ``5 ms of each 50 ms step (10 %)``."""
    return f"{milliseconds(cost_ms)} of each {milliseconds(step_ms)} step ({percent(cost_ms / step_ms)})"


def listed(ranks: tuple[int, ...] | list[int], most: int = 3) -> str:
    """Formats ranks, at most ``most`` of them: ``ranks 0, 1, 2 and more``."""
    shown = ", ".join(map(str, ranks[:most])) + (" and more" if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
