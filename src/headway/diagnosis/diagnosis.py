"""Diagnoses a recorded job: where its step time goes, which ranks and links slow it down, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway import files
from headway.cluster import Cluster
from headway.diagnosis.averaging import NOT_TOGETHER, Averaging, find_averaging, with_group_finding
from headway.diagnosis.breakdown import (
    NS_A_MS,
    Breakdown,
    RankTime,
    breakdown,
    mean_breakdown,
    overlap_percent,
    rank_time,
)
from headway.diagnosis.causes import find_causes
from headway.diagnosis.communication import Communications, match
from headway.diagnosis.critical_path import PathPiece, critical_path, typical_step
from headway.diagnosis.details import Details, find_details
from headway.diagnosis.findings import Finding, listed, milliseconds
from headway.diagnosis.links import Link, find_links
from headway.diagnosis.stragglers import UNKNOWN, Straggler, blames, find_stragglers
from headway.diagnosis.verdict import verdict
from headway.errors import TraceError
from headway.notebook import table_html
from headway.trace.events import Kind
from headway.trace.format import Trace

LEAST_STEPS = 3  # needed to leave out the first
APART = 1.0  # typical steps: the tolerated spread of the ranks' first step starts
BROKEN_SHARE, BROKEN_LEAST = 0.1, 3  # of the collectives: fewer are broken by chance
SLACK_NS = 100_000  # tolerated error of recorded starts and ends
NEED_CLOCKS = frozenset({"straggler", "moving_imbalance", "late_launch", "slow_link", "clock_skew", "groups"})
"""Findings about who waits for whom. They need aligned clocks and correctly matched collectives."""

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def skewed_start(trace: Trace, steps: Sequence[int]) -> str:
    """A note if some ranks began recording their first step much later than the others; "" otherwise.

    The other ranks waited for them in that step, which is not typical of the job.
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
    return (
        f"Step {steps[0]} is left out: the recording of {listed(ranks, 8)} begins "
        f"{milliseconds(float(apart_ns[0]) / 1e6)} after the others, which wait in that step only for this reason."
    )


def contradictions(
    trace: Trace,
    times: dict[int, RankTime],
    rows: Communications,
    stragglers: Sequence[Straggler],
    step_ms: float,
) -> list[str]:
    """Contradictions in a recording, such as collectives that end early. Blaming ranks is then impossible."""
    broken = []
    uncertain_ns = max((info.clock.uncertainty_ns for info in trace.manifest.ranks), default=0.0)
    if (early := _ended_before_all_came(rows, 2 * uncertain_ns + SLACK_NS)) is not None:
        broken.append(early)
    short = [rank for rank, time in times.items() if _is_too_long(time)]
    if short:
        broken.append(f"parts of the steps of rank {short[0]} add up to more than the steps")
    if stragglers and stragglers[0].cost_ms > step_ms:
        worst = stragglers[0]
        broken.append(
            f"the other ranks wait {milliseconds(worst.cost_ms)} of each {milliseconds(step_ms)} step for rank "
            f"{worst.rank}"
        )
    return broken


def _ended_before_all_came(rows: Communications, slack_ns: float) -> str | None:
    """Describes collectives that end on one rank before another rank begins them; None if there are few."""
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


@dataclass(frozen=True, slots=True)
class Clock:
    """The alignment of a rank's clock with rank 0's."""

    offset_us: float
    drift_ppm: float
    uncertainty_us: float


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a recorded job.

    ``step_ms`` is the mean step over ranks and recorded steps; ``breakdown`` splits each rank's mean step into parts
    that add up to it. ``findings`` are the causes of long steps, the most important first; ``verdict`` states it.
    ``critical_path`` is the path of ``typical_step``, the step of median length, and adds up to that step.
    """

    verdict: str
    steps: tuple[int, ...]
    step_ms: float
    typical_step: int
    typical_step_ms: float
    breakdown: dict[int, Breakdown]
    overlap_percent: float
    stragglers: tuple[Straggler, ...]
    links: tuple[Link, ...]
    critical_path: tuple[PathPiece, ...]
    clock: dict[int, Clock]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    step_times_ms: tuple[float, ...] = ()  # per recorded step, averaged over ranks
    averaging: Averaging | None = None  # if ranks average their models in groups
    details: Details | None = None

    def _repr_html_(self) -> str:
        """Shows the verdict and the findings that stand out in a notebook."""
        return table_html(
            self.verdict,
            ("cause", "ms per step", "ranks", "what to do"),
            (
                (
                    finding.cause,
                    f"{finding.cost_ms:.2f}",
                    ", ".join(map(str, finding.ranks)),
                    finding.sentence,
                )
                for finding in self.findings
                if finding.stands_out
            ),
        )

    def to_document(self) -> dict[str, Any]:
        """The document printed by ``headway diagnose --json``."""
        return files.document(
            "diagnosis",
            verdict=self.verdict,
            findings=[finding.to_document() for finding in self.findings],
            steps=list(self.steps),
            step_ms=round(self.step_ms, 6),
            typical_step=self.typical_step,
            typical_step_ms=round(self.typical_step_ms, 6),
            breakdown_ms={str(rank): parts.rounded() for rank, parts in self.breakdown.items()},
            overlap_percent=round(self.overlap_percent, 3),
            stragglers=[_straggler_document(straggler) for straggler in self.stragglers],
            critical_path=[
                {"rank": piece.rank, "kind": piece.kind, "name": piece.name, "ms": round(piece.ms, 6)}
                for piece in self.critical_path
            ],
            clock={
                str(rank): {
                    "offset_us": clock.offset_us,
                    "drift_ppm": clock.drift_ppm,
                    "uncertainty_us": clock.uncertainty_us,
                }
                for rank, clock in self.clock.items()
            },
            links=[_link_document(link) for link in self.links],
            notes=list(self.notes),
            **({} if self.details is None else self.details.to_document()),
            **({} if self.averaging is None else {"averaging": self.averaging.to_document()}),
        )


def diagnose(trace: Trace, cluster: Cluster | None = None) -> Diagnosis:
    """Diagnoses ``trace``. ``cluster`` adds the capacity of links.

    Raises TraceError if the ranks share no recorded step, ClusterError if ``cluster`` does not match the trace.
    """
    steps = _common_steps(trace)
    late_start = skewed_start(trace, steps)
    steps = steps[1:] if late_start else steps
    rows = match(trace)
    times = {
        rank: rank_time(rank, events, steps, rows.of_rank(rank))
        for rank, events in sorted(trace.events.items())
    }
    parts = {rank: breakdown(time) for rank, time in times.items()}
    mean = mean_breakdown(list(parts.values()))
    step_ms = mean.total_ms
    clock = _clock(trace)
    blamed = blames(times, rows)
    stragglers = find_stragglers(
        times,
        rows,
        blamed,
        step_ms=step_ms,
        uncertainty_ms=max((rank_clock.uncertainty_us for rank_clock in clock.values()), default=0.0) / 1e3,
    )
    if trace.missing_ranks:  # a rank that is late for no visible reason may itself wait for a missing rank
        stragglers = tuple(straggler for straggler in stragglers if straggler.cause != UNKNOWN)
    apart = (NOT_TOGETHER,) if trace.rounds else ()
    path = critical_path(trace, times, rows)
    index, rank = typical_step(times)
    length_ns = int(times[rank].step_end_ns[index] - times[rank].step_start_ns[index])
    averaging = find_averaging(trace)
    findings = find_causes(trace, times, rows, mean, stragglers, blamed, steps)
    if averaging is not None:
        findings = with_group_finding(findings, averaging, step_ms)
    broken = contradictions(trace, times, rows, stragglers, step_ms)
    if broken:
        stragglers = ()
        findings = [finding for finding in findings if finding.cause not in NEED_CLOCKS]
    return Diagnosis(
        verdict=verdict(
            mean,
            findings,
            contradictions=broken,
            silent=trace.world_size > 1
            and not len(rows)
            and any(info.backend for info in trace.manifest.ranks),
            world_size=len(times),
        ),
        findings=tuple(findings),
        steps=steps,
        step_ms=step_ms,
        typical_step=steps[index],
        typical_step_ms=length_ns / NS_A_MS,
        breakdown=parts,
        overlap_percent=0.0 if _blocks_its_threads(trace) else overlap_percent(list(times.values())),
        stragglers=stragglers,
        links=find_links(trace, times, rows, cluster),
        critical_path=path,
        clock=clock,
        notes=(
            *((late_start,) if late_start else ()),
            *trace.manifest.notes,
            *apart,
            *_notes(trace, times, rows, clock, step_ms),
        ),
        step_times_ms=_step_times_ms(times),
        averaging=averaging,
        details=find_details(trace, times, rows),
    )


def _step_times_ms(times: dict[int, RankTime]) -> tuple[float, ...]:
    lengths = np.stack([time.step_end_ns - time.step_start_ns for time in times.values()])
    return tuple((lengths.mean(axis=0) / NS_A_MS).tolist())


def _blocks_its_threads(trace: Trace) -> bool:
    """Whether every collective blocks its calling thread, so that none overlaps: FSDP2 on Gloo."""
    return all(info.fully_sharded and "gloo" in info.backend.lower() for info in trace.manifest.ranks)


def _common_steps(trace: Trace) -> tuple[int, ...]:
    steps = set(trace.steps)
    for events in trace.events.values():
        steps &= events.whole_steps
    if not steps:
        raise TraceError(
            "no step was recorded completely on all ranks",
            got=trace.path,
            expected="at least one complete step shared by all ranks",
            fix="Record more steps.",
        )
    return tuple(sorted(steps))


def _clock(trace: Trace) -> dict[int, Clock]:
    return {
        info.rank: Clock(
            offset_us=info.clock.offset_ns / 1e3,
            drift_ppm=info.clock.drift_ppm,
            uncertainty_us=info.clock.uncertainty_ns / 1e3,
        )
        for info in trace.manifest.ranks
    }


def _notes(
    trace: Trace, times: dict[int, RankTime], rows: Communications, clock: dict[int, Clock], step_ms: float
) -> tuple[str, ...]:
    """Caveats that readers should know before they trust the numbers."""
    notes = []
    dropped = {info.rank: info.dropped_events for info in trace.manifest.ranks if info.dropped_events}
    if dropped:
        rank = max(dropped, key=lambda dropping: dropped[dropping])
        notes.append(
            f"{sum(dropped.values())} events were dropped during recording (most on rank {rank}); "
            "their time counts as rest."
        )
    if trace.missing_ranks:
        notes.append(
            "Communication with ranks that are missing from this trace includes the time spent waiting for them."
        )
    blank = [rank for rank, time in times.items() if not len(time.forward) and not len(time.backward)]
    if blank:
        notes.append(
            f"No forward or backward was recorded on {listed(blank, 8)}: their time counts as rest, and the reason for "
            "late arrivals is unknown."
        )
    silent = [rank for rank in times if not (rows.rank == rank).any()]
    if silent and len(times) > 1:
        notes.append(
            f"No communication was recorded on {listed(silent, 8)}: time spent waiting for it counts as rest."
        )
    alone = np.bincount(rows.instance)[rows.instance] == 1 if len(rows) else np.zeros(0, dtype=bool)
    alone &= rows.kind == Kind.COLLECTIVE
    if len(times) > 1 and alone.sum() > 0.05 * len(rows):
        notes.append(
            f"{int(alone.sum())} of {len(rows)} communication events have no counterpart on another rank: waiting for "
            "their members counts as exposed communication."
        )
    vague = max(clock, key=lambda rank: clock[rank].uncertainty_us, default=None)
    if vague is not None and clock[vague].uncertainty_us / 1e3 > 0.02 * step_ms:
        notes.append(
            f"The clock of rank {vague} is uncertain by {clock[vague].uncertainty_us:.0f} us, more than 2 % of a step: "
            "smaller differences between ranks mean nothing."
        )
    return tuple(notes)


def _straggler_document(straggler: Straggler) -> dict[str, Any]:
    return {
        "rank": straggler.rank,
        "blame_ms": round(straggler.blame_ms, 6),
        "hidden_ms": round(straggler.hidden_ms, 6),
        "cause": straggler.cause,
        "late_ms": round(straggler.late_ms, 6),
        "own_ms": round(straggler.own_ms, 6),
        "others_ms": round(straggler.others_ms, 6),
    }


def _link_document(link: Link) -> dict[str, Any]:
    document: dict[str, Any] = {
        "from": link.source,
        "to": link.target,
        "gbps": round(link.gbps, 6),
        "utilisation": round(link.utilisation, 4),
    }
    if link.capacity_gbps is not None:
        document["capacity_gbps"] = round(link.capacity_gbps, 6)
    return document
