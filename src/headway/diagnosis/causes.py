"""The causes of long steps, in the order of what they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Floats, Ints
from headway.diagnosis.breakdown import NS_A_MS, REST, Breakdown, RankTime
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import (
    HALF,
    Finding,
    milliseconds,
    of_each_step,
    percent,
    ranked,
    superseded,
    unexplained,
)
from headway.diagnosis.gradients import communication_cost_ms, communication_shape
from headway.diagnosis.network import find_slow_link, link_finding
from headway.diagnosis.pipeline import EXPLAINED, of_messages, pipeline_findings, waits_for_messages
from headway.diagnosis.stalls import Stalls, find_stalls, longest_pause, stall_finding
from headway.diagnosis.stragglers import CAUSES, Blame, Straggler, is_moving, least_blame_ms, uneven
from headway.diagnosis.verdict import Waits, needless_search, usual_findings
from headway.trace.events import Events, Idle, Kind
from headway.trace.format import Trace
from headway.units import format_bytes

IDLE_STANDS_OUT = 0.10  # of the step
MOSTLY = 0.5  # of the idleness


def idle_finding(times: dict[int, RankTime], events: dict[int, Events], step_ms: float) -> Finding | None:
    """What idle devices cost, where their idleness is recorded."""
    idle_ns = synchronising_ns = count = steps = 0
    for rank, time in times.items():
        rows = events[rank].of_kind(Kind.IDLE)
        own = rows.name == Idle.SYNCHRONISING
        idle_ns += int(rows.duration_ns.sum())
        synchronising_ns += int(rows.duration_ns[own].sum())
        count += int(own.sum())
        steps += len(time.step_start_ns)
    if not idle_ns:
        return None
    cost_ms = idle_ns / steps / 1e6
    cost = of_each_step(cost_ms, step_ms)
    if synchronising_ns > MOSTLY * idle_ns:
        cause = "synchronisation"
        sentence = (
            f"The device is idle for {cost} because the program synchronises with it {count / steps:.3g} times "
            "a step and launches nothing meanwhile; remove what synchronises (.item(), .cpu(), printing losses, "
            "torch.cuda.synchronize)."
        )
    else:
        cause = "launch_bound"
        sentence = (
            f"The device is idle for {cost} because its host does not launch work fast enough; launch fewer kernels, "
            "with larger batches, fused operators, torch.compile or CUDA graphs, and look at what else the host does."
        )
    return Finding(cause, cost_ms, sentence, (), cost_ms >= IDLE_STANDS_OUT * step_ms)


SERVERS_STAND_OUT = 0.10  # of the step
BUSY = 0.5  # of what is waited for: from here on it is the servers' own work


def server_finding(
    trace: Trace, times: dict[int, RankTime], rows: Communications, step_ms: float
) -> Finding | None:
    """What pushes and pulls cost, where there are any; and whether the servers' own work is why."""
    served = np.isin(rows.kind, [Kind.PUSH, Kind.PULL])
    if not served.any():
        return None
    waited_ns = steps = 0
    waits = []
    for rank, time in times.items():
        own = served & (rows.rank == rank)
        spans = intervals.intersect(time.wait, intervals.union(rows.arrival_ns[own], rows.end_ns[own]))
        waited_ns += int(time.per_step(spans).sum())
        waits.append(spans)
        steps += len(time.step_start_ns)
    cost_ms = waited_ns / steps / 1e6
    share = _busy_share(trace, intervals.join(*waits))
    because = (
        f"the servers sum and update for {percent(share)} of that; add servers, or spread keys over them"
        if share > BUSY
        else "the servers' own work is little of it; look at the network between them, push less, or less often"
    )
    count = served.sum() / steps
    sentence = (
        f"Parameter servers are the bottleneck: workers wait {of_each_step(cost_ms, step_ms)} for {count:.3g} pushes "
        f"and pulls; {because}."
    )
    return Finding("parameter_servers", cost_ms, sentence, (), cost_ms >= SERVERS_STAND_OUT * step_ms)


def _busy_share(trace: Trace, waits: intervals.Spans) -> float:
    """For how much of ``waits`` some server sums or updates."""
    busy = [
        intervals.union(own.start_ns, own.end_ns)
        for own in (events.of_kind(Kind.SUM, Kind.OPTIMIZER) for events in trace.servers.values())
    ]
    length_ns = intervals.length_ns(waits)
    if not busy or not length_ns:
        return 0.0
    return intervals.length_ns(intervals.intersect(intervals.join(*busy), waits)) / length_ns


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


LATE_LAUNCH_STANDS_OUT = 0.05  # of the step
MOST_GRADIENTS = 0.5  # of the model's bytes: from here on, what is reduced after backward are the gradients
_REDUCING = ("all_reduce", "reduce_scatter")
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class LateLaunch:
    """Gradients reduced after backward: how many collectives a step, and how long they had been ready on average."""

    collectives: float
    size_bytes: float
    ready_ms: float | None  # where that is recorded
    waited_ms: float  # a step, until they had arrived
    cost_ms: float  # what of that backward could have hidden


def find_late_launch(trace: Trace, times: dict[int, RankTime], rows: Communications) -> LateLaunch | None:
    """Find gradients that are reduced only when backward is over. Needs a recorded model."""
    whole = sum(parameter.size_bytes for parameter in trace.model.parameters)
    if not whole:
        return None
    reducing = rows.where((rows.bucket < 0) & np.isin(rows.name.astype(str), _REDUCING))
    found = [
        _late_steps(time, trace.events[rank], reducing.of_rank(rank), MOST_GRADIENTS * whole)
        for rank, time in times.items()
    ]
    counts, sizes, ready_ns, waited_ns, hideable_ns = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    steps = sum(len(time.step_start_ns) for time in times.values())
    if not len(counts) or len(counts) < 0.5 * steps:
        return None
    known_ns = ready_ns[~np.isnan(ready_ns)]
    return LateLaunch(
        collectives=float(counts.mean()),
        size_bytes=float(sizes.mean()),
        ready_ms=float(known_ns.mean()) / NS_A_MS if len(known_ns) else None,
        waited_ms=float(waited_ns.sum()) / steps / NS_A_MS,
        cost_ms=float(hideable_ns.sum()) / steps / NS_A_MS,
    )


def _late_steps(
    time: RankTime, events: Events, own: Communications, least_bytes: float
) -> tuple[Floats, ...]:
    """One rank's steps that reduce at least ``least_bytes`` when their backward is over.

    Of each: how many collectives, their bytes, for how long the gradients had been ready (NaN where nobody knows), how
    long they were waited for, and how much of that backward could have hidden.
    """
    steps = len(time.step_start_ns)
    passes, ready = events.of_kind(Kind.BACKWARD_PASS), events.of_kind(Kind.GRADIENT_READY)
    over = np.full(steps, _NEVER)  # when backward is over
    of_pass, within = _steps_of(time, passes.start_ns, passes.end_ns)
    np.maximum.at(over, of_pass[within], passes.end_ns[within])
    of_row, within = _steps_of(time, own.enqueue_ns, own.end_ns)
    late = within & (own.enqueue_ns >= over[of_row]) & (over[of_row] > _NEVER)
    sizes = np.bincount(of_row[late], own.size_bytes[late], steps).astype(np.float64)
    told = (sizes > 0) & (sizes >= least_bytes)
    late &= told[of_row]
    spans = intervals.union(own.arrival_ns[late], own.end_ns[late])
    waited = time.per_step(intervals.intersect(time.exposed, spans)).astype(np.float64)
    of_ready, within = _steps_of(time, ready.start_ns, ready.start_ns)
    asked = _mean_since_start(time, of_row[late], own.enqueue_ns[late])
    ready_for = asked - _mean_since_start(time, of_ready[within], ready.start_ns[within])
    counts = np.bincount(of_row[late], minlength=steps).astype(np.float64)
    hideable = np.minimum(waited, time.per_step(time.backward).astype(np.float64))
    return tuple(column[told] for column in (counts, sizes, ready_for, waited, hideable))


def _steps_of(time: RankTime, starts: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The place of the step in which each span begins, and whether it lies in it as a whole."""
    steps = np.maximum(np.searchsorted(time.step_start_ns, starts, side="right") - 1, 0)
    return steps, (starts >= time.step_start_ns[steps]) & (ends <= time.step_end_ns[steps])


def _mean_since_start(time: RankTime, steps: Ints, moments: Ints) -> Floats:
    """The mean of each step's moments, counted from its start; NaN where it has none."""
    since = np.bincount(steps, moments - time.step_start_ns[steps], len(time.step_start_ns))
    count = np.bincount(steps, minlength=len(time.step_start_ns))
    return np.where(count > 0, since / np.maximum(count, 1), np.nan)


def launch_finding(late: LateLaunch, step_ms: float) -> Finding:
    """A late launch in words."""
    many = f"{late.collectives:.0f} collectives" if late.collectives > 1.5 else "one collective"
    ready = "" if late.ready_ms is None else f" {milliseconds(late.ready_ms)} after they were ready,"
    sentence = (
        f"Gradients are launched late: {format_bytes(late.size_bytes)} in {many} start only when backward is over,"
        f"{ready} which costs {of_each_step(late.cost_ms, step_ms)}; start each "
        "as soon as it is ready, as DistributedDataParallel does."
    )
    return Finding(
        "late_launch", late.cost_ms, sentence, (), late.cost_ms >= LATE_LAUNCH_STANDS_OUT * step_ms
    )


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
    steady = tuple(
        straggler for straggler in stragglers if not (finding.stands_out and _only_stalls(straggler, stalls))
    )
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
