"""Clocks that would have misled: a rank whose clock is off looks late, or makes all others look late."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.diagnosis.findings import Finding, milliseconds
from headway.trace.format import Trace

LEAST_SHARE = 0.05  # of a step: an offset that would be taken for a straggler
LONGEST_NS = 60e9  # clocks further apart were never meant to agree, and mislead nobody


@dataclass(frozen=True, slots=True)
class Skew:
    """A clock that was off: by how much it was behind the others' (negative: ahead), and the uncertainty of that."""

    rank: int
    behind_ns: float
    uncertainty_ns: float
    host: str = ""  # of several ranks, whose clock it is


def find_skew(trace: Trace, step_ms: float) -> Skew | None:
    """The clock that was furthest off, of those that were corrected by causality and would have misled.

    Offsets are relative to rank 0's clock. If most of the other clocks have the same offset, rank 0's was off.
    """
    fits = {info.rank: info.clock for info in trace.manifest.ranks}
    told = {rank: fit for rank, fit in fits.items() if fit.by == "causality"}
    if not told:
        return None
    offsets = {rank: fit.offset_ns if rank in told else 0.0 for rank, fit in fits.items()}
    ordered = sorted(offsets.values())
    usual = min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)
    vague = max(fit.uncertainty_ns for fit in told.values())
    found = [
        Skew(rank, offset - usual, max(fits[rank].uncertainty_ns, vague if usual else 0.0))
        for rank, offset in offsets.items()
    ]
    least_ns = LEAST_SHARE * step_ms * 1e6
    misleading = [
        one for one in found if max(least_ns, 2 * one.uncertainty_ns) < abs(one.behind_ns) < LONGEST_NS
    ]
    worst = max(misleading, key=lambda one: abs(one.behind_ns), default=None)
    if worst is None or sum(host == trace.hosts[worst.rank] for host in trace.hosts.values()) == 1:
        return worst
    return replace(worst, host=trace.hosts[worst.rank])


def skew_finding(skew: Skew, *, slow: bool) -> Finding:
    """A misleading clock in words. It costs nothing, and so comes after whatever does.

    ``slow`` says whether that rank is a straggler all the same.
    """
    ahead = skew.behind_ns < 0
    whose = f"host {skew.host}" if skew.host else f"rank {skew.rank}"
    it = "its ranks" if skew.host else "it"
    looks = f"makes {it} look late" if ahead else "makes all others look late"
    by = milliseconds(abs(skew.behind_ns) / 1e6)
    within = milliseconds(skew.uncertainty_ns / 1e6)
    clock = f"The clock of {whose} also" if slow else f"The clock of {whose}, not slowness,"
    sentence = (
        f"{clock} {looks}: it is {by} {'ahead' if ahead else 'behind'} (± {within}) and was corrected here, from "
        "what the ranks did together; keep that host's clock synchronised (chrony, PTP)."
    )
    return Finding("clock_skew", 0.0, sentence, (skew.rank,), False)
