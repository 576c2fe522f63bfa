"""The causes of long steps: every one that was looked for and found, in the order of what they cost."""

from __future__ import annotations

from functools import partial

import numpy as np

from headway.arrays import Floats
from headway.diagnosis.breakdown import NS_A_MS, Breakdown
from headway.diagnosis.communication import Communications
from headway.diagnosis.devices import idle_finding
from headway.diagnosis.exposure import communication_cost_ms
from headway.diagnosis.findings import HALF, Finding, ranked, superseded, unexplained
from headway.diagnosis.gradients import communication_shape
from headway.diagnosis.imbalance import is_moving, least_blame_ms, uneven
from headway.diagnosis.launches import find_late_launch, launch_finding
from headway.diagnosis.network import find_slow_link, link_finding
from headway.diagnosis.pauses import longest_pause
from headway.diagnosis.pipeline import EXPLAINED, of_messages, pipeline_findings, waits_for_messages
from headway.diagnosis.servers import server_finding
from headway.diagnosis.skew import find_skew, skew_finding
from headway.diagnosis.stalls import Stalls, find_stalls, stall_finding
from headway.diagnosis.stragglers import CAUSES, Blame, Straggler
from headway.diagnosis.timeline import REST, RankTime
from headway.diagnosis.verdict import Waits, needless_search, usual_findings
from headway.trace.format import Trace


def find_causes(
    trace: Trace,
    times: dict[int, RankTime],
    rows: Communications,
    mean: Breakdown,
    stragglers: tuple[Straggler, ...],
    blamed: list[Blame],
    steps: tuple[int, ...],
) -> list[Finding]:
    """Every finding, those that stand out first, the costliest before the others."""
    step_ms = mean.total_ms
    if step_ms <= 0:
        return []
    found = _of_mean_step(trace, times, rows, mean, stragglers, blamed, steps)
    if (idle := idle_finding(times, trace.events, step_ms)) is not None:
        found = superseded(found, idle, "rest")
    if (late := find_late_launch(trace, times, rows)) is not None:
        finding = launch_finding(late, step_ms)
        found = superseded(found, finding, "communication", explains_ms=late.waited_ms)
    if (link := find_slow_link(trace, times, rows, steps)) is not None:
        found = superseded(found, link_finding(link, step_ms), "communication")
    if (served := server_finding(trace, times, rows, step_ms)) is not None:
        found = superseded(found, served, "communication", "rest")
    if not trace.stages and waits_for_messages(times, rows):
        found = of_messages(found, times, stragglers, step_ms)
    elif trace.stages and (waits := pipeline_findings(trace, steps, step_ms)):
        found = [one for one in found if one.cause not in EXPLAINED] + waits
    if (skewed := find_skew(trace, step_ms)) is not None:
        slow = any(one.cause == "straggler" and skewed.rank in one.ranks for one in found)
        found.append(skew_finding(skewed, slow=slow))
    if (needless := needless_search(trace, steps)) is not None:
        found.append(needless)
    return ranked(found, step_ms, plannable=bool(trace.model.parameters))


def _of_mean_step(
    trace: Trace,
    times: dict[int, RankTime],
    rows: Communications,
    mean: Breakdown,
    stragglers: tuple[Straggler, ...],
    blamed: list[Blame],
    steps: tuple[int, ...],
) -> list[Finding]:
    """What the parts of the mean step say, and what of it are stalls in single steps."""
    sharded = any(info.fully_sharded for info in trace.manifest.ranks)
    blocks = all("gloo" in info.backend.lower() for info in trace.manifest.ranks)
    shape = communication_shape(times, rows, trace.events, sharded=sharded, blocks=blocks)
    late_ms = np.mean([time.per_step(time.straggling) for time in times.values()], axis=0) / NS_A_MS
    own_ms = np.stack([time.own_ms for time in times.values()])
    usual = partial(
        usual_findings,
        mean,
        shape=shape,
        pause=longest_pause(times, trace.events),
        communication_ms=communication_cost_ms(times, rows),
        hosts=trace.hosts,
        world_size=len(times),
    )
    ordered = _is_hidden(stragglers) or waits_for_messages(times, rows)
    stalls = find_stalls(times, trace.events, steps)
    if stalls is None:
        return usual(
            stragglers,
            moving=not ordered and is_moving(blamed, times),
            waits=_waits(late_ms, own_ms, mean.total_ms, trace),
        )
    finding = stall_finding(stalls, mean.total_ms, len(times))
    steady = tuple(one for one in stragglers if not (finding.stands_out and _only_stalls(one, stalls)))
    calm_ms = np.delete(late_ms, sorted(stalls.disturbed))
    found = usual(
        steady,
        moving=not ordered and is_moving(blamed, times, stalls.disturbed),
        waits=_waits(calm_ms, own_ms, mean.total_ms - stalls.cost_ms, trace),
    )
    part = stalls.where if stalls.where in CAUSES else REST
    of_mean_rank_ms = stalls.cost_ms * len(stalls.ranks) / len(times)
    return [*unexplained(found, finding, part, explained_ms=of_mean_rank_ms), finding]


def _waits(late_ms: Floats, own_ms: Floats, step_ms: float, trace: Trace) -> Waits:
    mean_ms = float(late_ms.mean()) if len(late_ms) else 0.0
    on_devices = all("ccl" in info.backend.lower() for info in trace.manifest.ranks)
    return Waits(
        mean_ms,
        uneven(late_ms, step_ms, len(own_ms), on_devices=on_devices),
        least_blame_ms(own_ms, step_ms, on_devices=on_devices),
    )


def _is_hidden(stragglers: tuple[Straggler, ...]) -> bool:
    """Whether the worst straggler delays communication, rather than that others stand still for it."""
    return bool(stragglers) and stragglers[0].hidden_ms > stragglers[0].blame_ms


def _only_stalls(straggler: Straggler, stalls: Stalls) -> bool:
    """Whether a rank is late for little else than its stalls."""
    return straggler.rank in stalls.ranks and stalls.cost_ms >= HALF * straggler.cost_ms
