"""Finds the causes of long steps and sorts them by cost.

Idle devices, parameter servers, wrong clocks and late launches are found here; stragglers, stalls, slow links and
pipelines in modules of their own.
"""

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
    drop_explained,
    milliseconds,
    of_each_step,
    ordered_findings,
    percent,
    supersede,
)
from headway.diagnosis.gradients import communication_cost_ms, communication_shape
from headway.diagnosis.network import find_slow_link, link_finding
from headway.diagnosis.pipeline import EXPLAINED, pipeline_findings, waits_for_messages, with_bubble_finding
from headway.diagnosis.stalls import Stalls, find_stalls, longest_pause, stall_finding
from headway.diagnosis.stragglers import CAUSES, Blame, Straggler, is_moving, is_uneven, least_blame_ms
from headway.diagnosis.verdict import Waits, needless_search, usual_findings
from headway.trace.events import Events, Idle, Kind
from headway.trace.format import Trace
from headway.units import format_bytes

IDLE_STANDS_OUT = 0.10  # of the step
MOSTLY = 0.5  # of the idle time


def idle_finding(times: dict[int, RankTime], events: dict[int, Events], step_ms: float) -> Finding | None:
    """The cost of idle devices; None if no idle time is recorded."""
    idle_ns = synchronising_ns = count = steps = 0
    for rank, time in times.items():
        rows = events[rank].of_kind(Kind.IDLE)
        synchronising = rows.name == Idle.SYNCHRONISING
        idle_ns += int(rows.duration_ns.sum())
        synchronising_ns += int(rows.duration_ns[synchronising].sum())
        count += int(synchronising.sum())
        steps += len(time.step_start_ns)
    if not idle_ns:
        return None
    cost_ms = idle_ns / steps / 1e6
    cost = of_each_step(cost_ms, step_ms)
    if synchronising_ns > MOSTLY * idle_ns:
        cause = "synchronisation"
        sentence = (
            f"The device is idle for {cost} because the program synchronises with it {count / steps:.3g} times "
            "per step and launches nothing meanwhile; remove synchronising calls (.item(), .cpu(), printing losses, "
            "torch.cuda.synchronize)."
        )
    else:
        cause = "launch_bound"
        sentence = (
            f"The device is idle for {cost} because the host does not launch work fast enough; launch fewer kernels "
            "(larger batches, fused operators, torch.compile, CUDA graphs), and check what else the host runs."
        )
    return Finding(cause, cost_ms, sentence, (), cost_ms >= IDLE_STANDS_OUT * step_ms)


SERVERS_STAND_OUT = 0.10  # of the step
BUSY = 0.5  # share of the wait from which the servers' own work is the reason


def server_finding(
    trace: Trace, times: dict[int, RankTime], rows: Communications, step_ms: float
) -> Finding | None:
    """The cost of pushes to and pulls from parameter servers, and whether servers or network cause it; None without."""
    served = np.isin(rows.kind, [Kind.PUSH, Kind.PULL])
    if not served.any():
        return None
    waited_ns = steps = 0
    waits = []
    for rank, time in times.items():
        of_rank = served & (rows.rank == rank)
        spans = intervals.intersect(
            time.wait, intervals.union(rows.arrival_ns[of_rank], rows.end_ns[of_rank])
        )
        waited_ns += int(time.per_step(spans).sum())
        waits.append(spans)
        steps += len(time.step_start_ns)
    cost_ms = waited_ns / steps / 1e6
    share = _busy_share(trace, intervals.join(*waits))
    because = (
        f"the servers spend {percent(share)} of that on sums and updates; add servers, or spread keys over them"
        if share > BUSY
        else "the servers themselves are mostly idle; check the network between them, push less, or push less often"
    )
    count = served.sum() / steps
    sentence = (
        f"Parameter servers are the bottleneck: workers wait {of_each_step(cost_ms, step_ms)} for {count:.3g} pushes "
        f"and pulls; {because}."
    )
    return Finding("parameter_servers", cost_ms, sentence, (), cost_ms >= SERVERS_STAND_OUT * step_ms)


def _busy_share(trace: Trace, waits: intervals.Spans) -> float:
    """The share of ``waits`` during which some server sums or updates."""
    busy = [
        intervals.union(rows.start_ns, rows.end_ns)
        for rows in (events.of_kind(Kind.SUM, Kind.OPTIMIZER) for events in trace.servers.values())
    ]
    length_ns = intervals.length_ns(waits)
    if not busy or not length_ns:
        return 0.0
    return intervals.length_ns(intervals.intersect(intervals.join(*busy), waits)) / length_ns


LEAST_SHARE = 0.05  # of a step: smaller offsets would not be mistaken for a straggler
LONGEST_NS = 60e9  # clocks further apart were never synchronised, and mislead nobody


@dataclass(frozen=True, slots=True)
class Skew:
    """A clock that was wrong by ``behind_ns`` ± ``uncertainty_ns`` compared with the others (negative: ahead)."""

    rank: int
    behind_ns: float
    uncertainty_ns: float
    host: str = ""  # the host whose clock it is, if it has several ranks


def find_skew(trace: Trace, step_ms: float) -> Skew | None:
    """The most wrong of the misleading clocks that were corrected by causality; None if there are none.

    Offsets are relative to rank 0's clock. If most other clocks share one offset, rank 0's clock was wrong.
    """
    fits = {info.rank: info.clock for info in trace.manifest.ranks}
    corrected = {rank: fit for rank, fit in fits.items() if fit.by == "causality"}
    if not corrected:
        return None
    offsets = {rank: fit.offset_ns if rank in corrected else 0.0 for rank, fit in fits.items()}
    ordered = sorted(offsets.values())
    usual = min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)
    vague = max(fit.uncertainty_ns for fit in corrected.values())
    skews = [
        Skew(rank, offset - usual, max(fits[rank].uncertainty_ns, vague if usual else 0.0))
        for rank, offset in offsets.items()
    ]
    least_ns = LEAST_SHARE * step_ms * 1e6
    misleading = [
        skew for skew in skews if max(least_ns, 2 * skew.uncertainty_ns) < abs(skew.behind_ns) < LONGEST_NS
    ]
    worst = max(misleading, key=lambda skew: abs(skew.behind_ns), default=None)
    if worst is None or sum(host == trace.hosts[worst.rank] for host in trace.hosts.values()) == 1:
        return worst
    return replace(worst, host=trace.hosts[worst.rank])


def skew_finding(skew: Skew, *, slow: bool) -> Finding:
    """Reports a misleading clock. It costs nothing, so it ranks below findings that do.

    ``slow`` says whether that rank is a straggler as well.
    """
    ahead = skew.behind_ns < 0
    whose = f"host {skew.host}" if skew.host else f"rank {skew.rank}"
    it = "its ranks" if skew.host else "it"
    looks = f"makes {it} look late" if ahead else "makes all other ranks look late"
    by = milliseconds(abs(skew.behind_ns) / 1e6)
    within = milliseconds(skew.uncertainty_ns / 1e6)
    clock = f"The clock of {whose} also" if slow else f"The clock of {whose}, not slowness,"
    sentence = (
        f"{clock} {looks}: it is {by} {'ahead' if ahead else 'behind'} (± {within}). Headway corrected it from the "
        "order of the collectives; keep that host's clock synchronised (chrony, PTP)."
    )
    return Finding("clock_skew", 0.0, sentence, (skew.rank,), False)


LATE_LAUNCH_STANDS_OUT = 0.05  # of the step
MOST_GRADIENTS = (
    0.5  # share of the model's bytes from which collectives after backward are taken for the gradients
)
_REDUCING = ("all_reduce", "reduce_scatter")
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class LateLaunch:
    """Gradients that are reduced only after backward, averaged over steps."""

    collectives: float
    size_bytes: float
    ready_ms: float | None  # how long they had been ready on average; None if not recorded
    waited_ms: float  # per step
    cost_ms: float  # the part of ``waited_ms`` that backward could have hidden


def find_late_launch(trace: Trace, times: dict[int, RankTime], rows: Communications) -> LateLaunch | None:
    """Finds gradients that are reduced only after backward, in at least half the steps; None without a model."""
    model_bytes = sum(parameter.size_bytes for parameter in trace.model.parameters)
    if not model_bytes:
        return None
    reducing = rows.where((rows.bucket < 0) & np.isin(rows.name.astype(str), _REDUCING))
    late_steps = [
        _late_steps(time, trace.events[rank], reducing.of_rank(rank), MOST_GRADIENTS * model_bytes)
        for rank, time in times.items()
    ]
    counts, sizes, ready_ns, waited_ns, hideable_ns = (
        np.concatenate(column) for column in zip(*late_steps, strict=True)
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
    time: RankTime, events: Events, rank_rows: Communications, least_bytes: float
) -> tuple[Floats, ...]:
    """One rank's steps that reduce at least ``least_bytes`` after backward, as five columns of one value per step.

    The columns: collectives, bytes, how long the gradients had been ready (NaN if unknown), how long the rank waited,
    and how much of that wait backward could have hidden; times in ns.
    """
    steps = len(time.step_start_ns)
    passes, ready = events.of_kind(Kind.BACKWARD_PASS), events.of_kind(Kind.GRADIENT_READY)
    over = np.full(steps, _NEVER)  # when backward is over
    of_pass, within = _steps_of(time, passes.start_ns, passes.end_ns)
    np.maximum.at(over, of_pass[within], passes.end_ns[within])
    of_row, within = _steps_of(time, rank_rows.enqueue_ns, rank_rows.end_ns)
    late = within & (rank_rows.enqueue_ns >= over[of_row]) & (over[of_row] > _NEVER)
    sizes = np.bincount(of_row[late], rank_rows.size_bytes[late], steps).astype(np.float64)
    is_late = (sizes > 0) & (sizes >= least_bytes)
    late &= is_late[of_row]
    spans = intervals.union(rank_rows.arrival_ns[late], rank_rows.end_ns[late])
    waited = time.per_step(intervals.intersect(time.exposed, spans)).astype(np.float64)
    of_ready, within = _steps_of(time, ready.start_ns, ready.start_ns)
    enqueued = _mean_since_start(time, of_row[late], rank_rows.enqueue_ns[late])
    ready_for = enqueued - _mean_since_start(time, of_ready[within], ready.start_ns[within])
    counts = np.bincount(of_row[late], minlength=steps).astype(np.float64)
    hideable = np.minimum(waited, time.per_step(time.backward).astype(np.float64))
    return tuple(column[is_late] for column in (counts, sizes, ready_for, waited, hideable))


def _steps_of(time: RankTime, starts: Ints, ends: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The index of the step in which each span begins, and whether the span ends within that step."""
    steps = np.maximum(np.searchsorted(time.step_start_ns, starts, side="right") - 1, 0)
    return steps, (starts >= time.step_start_ns[steps]) & (ends <= time.step_end_ns[steps])


def _mean_since_start(time: RankTime, steps: Ints, moments: Ints) -> Floats:
    """Each step's mean moment, in ns from its start; NaN for steps without moments."""
    since = np.bincount(steps, moments - time.step_start_ns[steps], len(time.step_start_ns))
    count = np.bincount(steps, minlength=len(time.step_start_ns))
    return np.where(count > 0, since / np.maximum(count, 1), np.nan)


def launch_finding(late: LateLaunch, step_ms: float) -> Finding:
    """Reports gradients that are launched late."""
    many = f"{late.collectives:.0f} collectives" if late.collectives > 1.5 else "one collective"
    ready = "" if late.ready_ms is None else f" {milliseconds(late.ready_ms)} after they were ready,"
    sentence = (
        f"Gradients are launched late: {format_bytes(late.size_bytes)} in {many} start only when backward is over,"
        f"{ready} which costs {of_each_step(late.cost_ms, step_ms)}; launch each collective "
        "as soon as its gradients are ready, as DistributedDataParallel does."
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
    """All findings: those that stand out first, then the others, each sorted by cost."""
    step_ms = mean.total_ms
    if step_ms <= 0:
        return []
    findings = _of_mean_step(trace, times, rows, mean, stragglers, blamed, steps)
    if (idle := idle_finding(times, trace.events, step_ms)) is not None:
        findings = supersede(findings, idle, "rest")
    if (late := find_late_launch(trace, times, rows)) is not None:
        launch = launch_finding(late, step_ms)
        findings = supersede(findings, launch, "communication", explains_ms=late.waited_ms)
    if (link := find_slow_link(trace, times, rows, steps)) is not None:
        findings = supersede(findings, link_finding(link, step_ms), "communication")
    if (served := server_finding(trace, times, rows, step_ms)) is not None:
        findings = supersede(findings, served, "communication", "rest")
    if not trace.stages and waits_for_messages(times, rows):
        findings = with_bubble_finding(findings, times, stragglers, step_ms)
    elif trace.stages and (waits := pipeline_findings(trace, steps, step_ms)):
        findings = [finding for finding in findings if finding.cause not in EXPLAINED] + waits
    if (skewed := find_skew(trace, step_ms)) is not None:
        slow = any(finding.cause == "straggler" and skewed.rank in finding.ranks for finding in findings)
        findings.append(skew_finding(skewed, slow=slow))
    if (needless := needless_search(trace, steps)) is not None:
        findings.append(needless)
    return ordered_findings(findings, step_ms, plannable=bool(trace.model.parameters))


def _of_mean_step(
    trace: Trace,
    times: dict[int, RankTime],
    rows: Communications,
    mean: Breakdown,
    stragglers: tuple[Straggler, ...],
    blamed: list[Blame],
    steps: tuple[int, ...],
) -> list[Finding]:
    """Findings from the parts of the mean step, and the stalls of single steps."""
    sharded = any(info.fully_sharded for info in trace.manifest.ranks)
    blocks = all("gloo" in info.backend.lower() for info in trace.manifest.ranks)
    shape = communication_shape(times, rows, trace.events, sharded=sharded, blocks=blocks)
    late_ms = np.mean([time.per_step(time.straggling) for time in times.values()], axis=0) / NS_A_MS
    busy_ms = np.stack([time.busy_ms for time in times.values()])
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
            waits=_waits(late_ms, busy_ms, mean.total_ms, trace),
        )
    finding = stall_finding(stalls, mean.total_ms, len(times))
    steady = tuple(
        straggler for straggler in stragglers if not (finding.stands_out and _only_stalls(straggler, stalls))
    )
    calm_ms = np.delete(late_ms, sorted(stalls.disturbed))
    findings = usual(
        steady,
        moving=not ordered and is_moving(blamed, times, stalls.disturbed),
        waits=_waits(calm_ms, busy_ms, mean.total_ms - stalls.cost_ms, trace),
    )
    part = stalls.where if stalls.where in CAUSES else REST
    of_mean_rank_ms = stalls.cost_ms * len(stalls.ranks) / len(times)
    return [*drop_explained(findings, finding, part, explained_ms=of_mean_rank_ms), finding]


def _waits(late_ms: Floats, busy_ms: Floats, step_ms: float, trace: Trace) -> Waits:
    mean_ms = float(late_ms.mean()) if len(late_ms) else 0.0
    on_devices = all("ccl" in info.backend.lower() for info in trace.manifest.ranks)
    return Waits(
        mean_ms,
        is_uneven(late_ms, step_ms, len(busy_ms), on_devices=on_devices),
        least_blame_ms(busy_ms, step_ms, on_devices=on_devices),
    )


def _is_hidden(stragglers: tuple[Straggler, ...]) -> bool:
    """Whether the worst straggler mainly delays later communication, rather than making others wait directly."""
    return bool(stragglers) and stragglers[0].hidden_ms > stragglers[0].blame_ms


def _only_stalls(straggler: Straggler, stalls: Stalls) -> bool:
    """Whether stalls explain most of a straggler's cost."""
    return straggler.rank in stalls.ranks and stalls.cost_ms >= HALF * straggler.cost_ms
