"""Findings: what makes steps longer than they need be, each with its cost and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. ``cost_ms`` estimates by how much a mean step would be shorter without it; ``ranks`` are to blame.

    ``sentence`` names the cause, who is to blame, the cost and what to do. ``stands_out`` says whether it is large
    enough to be told first.
    """

    cause: str
    cost_ms: float
    sentence: str
    ranks: tuple[int, ...] = ()
    stands_out: bool = True

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            "cause": self.cause,
            "cost_ms": round(self.cost_ms, 6),
            "ranks": list(self.ranks),
            "sentence": self.sentence,
        }


def replaced(
    found: Sequence[Finding], finer: Finding, *coarser: str, explains_ms: float = -1.0
) -> list[Finding]:
    """``found`` with ``finer``, in place of the coarser findings that it explains by half or more.

    ``explains_ms`` is how much of a step it explains, where that is not its cost.
    """
    explained_ms = max(explains_ms, finer.cost_ms)
    kept = [
        one
        for one in found
        if one.cause not in coarser or not finer.stands_out or explained_ms < 0.5 * one.cost_ms
    ]
    return [*kept, finer]


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
