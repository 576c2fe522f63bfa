"""Clocks that would have misled: a rank whose clock is off looks late, or makes all others look late."""

from __future__ import annotations

from headway.diagnose.findings import Finding, milliseconds
from headway.trace.format import ClockFit, Trace

LEAST_SHARE = 0.05  # of a step: an offset that would be taken for a straggler
LONGEST_NS = 60e9  # clocks further apart never were meant to agree, and mislead nobody


def find_skew(trace: Trace, step_ms: float) -> tuple[int, ClockFit] | None:
    """The rank whose clock was furthest off, of those that were set right by causality and would have misled."""
    off = {
        info.rank: info.clock
        for info in trace.manifest.ranks
        if info.clock.by == "causality"
        and max(LEAST_SHARE * step_ms * 1e6, 2 * info.clock.uncertainty_ns)
        < abs(info.clock.offset_ns)
        < LONGEST_NS
    }
    if not off:
        return None
    rank = max(off, key=lambda one: abs(off[one].offset_ns))
    return rank, off[rank]


def skew_finding(rank: int, clock: ClockFit) -> Finding:
    """A misleading clock in words. It costs nothing, and so stands behind whatever does."""
    ahead = clock.offset_ns < 0
    looks = "looks late" if ahead else "makes all others look late"
    by = milliseconds(abs(clock.offset_ns) / 1e6)
    within = milliseconds(clock.uncertainty_ns / 1e6)
    sentence = (
        f"It is the clock of rank {rank}, not slowness, that {looks}: it is {by} {'ahead' if ahead else 'behind'} "
        f"(± {within}) and was set right here, from what the ranks did together; keep that host's clock in step "
        "(chrony, PTP)."
    )
    return Finding("clock_skew", 0.0, sentence, (rank,), False)
