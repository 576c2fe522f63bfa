"""Which candidates fit into the memory that a rank has."""

from __future__ import annotations

from collections.abc import Iterable

from headway.errors import UserError
from headway.optimization.candidate import Candidate
from headway.units import format_bytes

PEAK_UNCERTAINTY = 0.05
"""By how much predicted peaks may be too low (benchmarks/pipeline_memory.py)."""
ROUGH_PEAK_UNCERTAINTY = 0.5
"""The same where memory was not watched: what modules put out stands for what they keep."""


def within(
    candidates: Iterable[Candidate], limit_bytes: int | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Those under which no rank needs more than ``limit_bytes``, and the others.

    A predicted peak may be too low by up to ``PEAK_UNCERTAINTY``, one that is rough by more. Raises UserError where
    none is within the limit.
    """
    fitting: list[Candidate] = []
    excluded: list[Candidate] = []
    for each in candidates:
        (fitting if fits_within(each, limit_bytes) else excluded).append(each)
    if limit_bytes is not None and not fitting:
        least = min(excluded, key=needed_bytes)
        raise UserError(
            "no plan keeps every rank within the memory limit",
            got=f"{format_bytes(needed_bytes(least))} for {least.name}, which needs least of {len(excluded)}",
            expected=f"at most {format_bytes(limit_bytes)}",
            fix="Raise --memory-limit, or record the job with smaller micro-batches or more stages; where its memory "
            "was not watched (~), record it under DDP.",
        )
    return fitting, excluded


def fits_within(candidate: Candidate, limit_bytes: int | None) -> bool:
    """Whether no rank needs more than ``limit_bytes``, where there is a limit; what it needs has to be known then."""
    if limit_bytes is None:
        return True
    return candidate.peak_bytes is not None and needed_bytes(candidate) <= limit_bytes


def needed_bytes(candidate: Candidate) -> int:
    """The memory that a rank should have for it: its predicted peak, and what that may be too low by."""
    share = ROUGH_PEAK_UNCERTAINTY if candidate.peak_is_rough else PEAK_UNCERTAINTY
    return round((candidate.peak_bytes or 0) * (1 + share))


def exclusion(excluded: Iterable[Candidate], limit_bytes: int) -> str:
    """Say what the limit has excluded."""
    named = ", ".join(f"{each.name} ({format_bytes(needed_bytes(each))})" for each in excluded)
    return f"left out, as a rank would need more than the limit of {format_bytes(limit_bytes)}: {named}"
