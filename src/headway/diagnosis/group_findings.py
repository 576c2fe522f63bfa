"""What averaging in groups costs a step, and for whom ranks wait: in the place of what is said of collectives."""

from __future__ import annotations

from collections.abc import Sequence

from headway.diagnosis.averaging import Averaging
from headway.diagnosis.findings import Finding, listed, milliseconds, of_each_step, ranked

STANDS_OUT = 0.10  # of the step
NAMED = 0.4  # of the time until groups begin, for which one rank is named
EXPLAINED = ("communication", "moving_imbalance")
"""Causes that a job whose ranks average in groups does not have: the groups are its communication."""
NOT_TOGETHER = (
    "Ranks do not take their steps together: a step has one number on all, and a time of its own on each."
)


def of_groups(findings: Sequence[Finding], found: Averaging, step_ms: float) -> list[Finding]:
    """``findings`` with what groups cost, in the place of what is said of collectives that all ranks share."""
    if step_ms <= 0:
        return list(findings)
    kept = [each for each in findings if each.cause not in EXPLAINED]
    return ranked([*kept, averaging_finding(found, step_ms)], step_ms)


def averaging_finding(found: Averaging, step_ms: float) -> Finding:
    """What groups cost a step, and for whom ranks wait."""
    standing_ms = found.mean_standing_ms
    total_ms = sum(found.waited_for_ms.values())
    worst = max(found.waited_for_ms, key=lambda rank: found.waited_for_ms[rank], default=None)
    named: tuple[int, ...] = ()
    waits = "each time for a different one"
    if worst is not None and total_ms > 0 and found.waited_for_ms[worst] >= NAMED * total_ms:
        named = (worst,)
        host = f" on {found.hosts[worst]}" if found.hosts.get(worst) else ""
        waits = f"most for {listed(named)}{host} ({milliseconds(found.waited_for_ms[worst])})"
    advice = (
        "look at what slows that rank down, or let groups begin without it (groups: first-come)"
        if named
        else "smaller groups, or staleness: 1, wait less"
    )
    sentence = (
        f"Ranks stand still for their groups for {of_each_step(standing_ms, step_ms)}; members wait "
        f"{milliseconds(total_ms)} for the last of their group to come, {waits}; {advice}."
    )
    return Finding("groups", standing_ms, sentence, named, standing_ms >= STANDS_OUT * step_ms)
