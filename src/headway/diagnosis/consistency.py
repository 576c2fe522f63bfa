"""Whether a recording can be believed: a first step that profilers began apart, and what cannot all be true."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import milliseconds
from headway.diagnosis.stragglers import Straggler
from headway.diagnosis.timeline import RankTime
from headway.trace.events import Kind
from headway.trace.format import Trace

LEAST_STEPS = 3  # of which the first may be left out
APART = 1.0  # usual steps by which ranks may begin the first one apart
BROKEN_SHARE, BROKEN_LEAST = 0.1, 3  # of collectives: chance breaks fewer
SLACK_NS = 100_000  # by which ends and begins are recorded too early or too late
OF_ORDER = frozenset({"straggler", "moving_imbalance", "late_launch", "slow_link", "clock_skew", "groups"})
"""Findings that say who waits for whom: they need clocks, and collectives that are matched rightly."""

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def skewed_start(trace: Trace, steps: Sequence[int]) -> str:
    """What to say of a first step that some ranks began to record long after the others; "" where none did.

    Those who were there earlier waited for them in that step, which no job does again.
    """
    if len(steps) < LEAST_STEPS or len(trace.events) < 2:
        return ""
    begins_ns, lengths_ns = [], []
    for events in trace.events.values():
        rows = events.of_kind(Kind.STEP)
        place = {step: index for index, step in reversed(list(enumerate(rows.step.tolist())))}
        picked = [place[step] for step in steps]
        begins_ns.append(rows.start_ns[picked])
        lengths_ns.append(rows.duration_ns[picked])
    begins, lengths = np.stack(begins_ns), np.stack(lengths_ns)
    usual_ns = float(np.median(lengths[:, 1:]))
    apart_ns = begins.max(axis=0) - begins.min(axis=0)
    if apart_ns[0] <= APART * usual_ns or apart_ns[0] <= 2 * np.median(apart_ns[1:]):
        return ""
    if lengths[:, 0].max() <= 2 * usual_ns:
        return ""
    late = begins[:, 0] - begins[:, 0].min() > apart_ns[0] / 2
    ranks = [rank for rank, is_late in zip(trace.events, late.tolist(), strict=True) if is_late]
    shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return (
        f"Step {steps[0]} is left out: the recording of rank{'s' if len(ranks) > 1 else ''} {shown} begins "
        f"{milliseconds(float(apart_ns[0]) / 1e6)} after that of the others, who wait there for that alone."
    )


def contradictions(
    trace: Trace,
    times: dict[int, RankTime],
    rows: Communications,
    stragglers: Sequence[Straggler],
    step_ms: float,
) -> list[str]:
    """What of a recording cannot be true, and where. Nothing about who waits for whom follows from such a one."""
    found = []
    uncertain_ns = max((info.clock.uncertainty_ns for info in trace.manifest.ranks), default=0.0)
    if (early := _ended_before_all_came(rows, 2 * uncertain_ns + SLACK_NS)) is not None:
        found.append(early)
    short = [rank for rank, time in times.items() if _is_too_long(time)]
    if short:
        found.append(f"parts of the steps of rank {short[0]} add up to more than the steps")
    if stragglers and stragglers[0].cost_ms > step_ms:
        worst = stragglers[0]
        found.append(
            f"the others wait {milliseconds(worst.cost_ms)} of each {milliseconds(step_ms)} step for rank {worst.rank}"
        )
    return found


def _ended_before_all_came(rows: Communications, slack_ns: float) -> str | None:
    """Collectives that are done on one rank before another has come to them, where there are many."""
    picked = rows.where((rows.kind == Kind.COLLECTIVE) & np.isin(rows.name.astype(str), _TOGETHER))
    if not len(picked):
        return None
    picked = picked.where(np.argsort(picked.instance, kind="stable"))
    first = np.flatnonzero(np.diff(picked.instance, prepend=-1))
    came_ns = np.maximum.reduceat(picked.enqueue_ns, first)
    ended_ns = np.minimum.reduceat(picked.end_ns, first)
    several = np.diff(np.append(first, len(picked))) > 1
    broken = several & (ended_ns + slack_ns < came_ns)
    if broken.sum() < max(BROKEN_LEAST, BROKEN_SHARE * several.sum()):
        return None
    worst = int(np.argmax(np.where(broken, came_ns - ended_ns, -1)))
    members = picked.where(picked.instance == picked.instance[first[worst]])
    early, late = int(np.argmin(members.end_ns)), int(np.argmax(members.enqueue_ns))
    by = milliseconds(float(came_ns[worst] - ended_ns[worst]) / 1e6)
    return (
        f"{int(broken.sum())} of {int(several.sum())} collectives end on one rank before another begins them, such as "
        f"{members.name[early]} in step {members.step[early]}, on rank {members.rank[early]} {by} before rank "
        f"{members.rank[late]}"
    )


def _is_too_long(time: RankTime) -> bool:
    parts = (time.forward, time.backward, time.optimizer, time.input, time.exposed, time.straggling)
    spent_ns = sum(int(time.per_step(part).sum()) for part in parts)
    return spent_ns > 1.001 * int((time.step_end_ns - time.step_start_ns).sum())
