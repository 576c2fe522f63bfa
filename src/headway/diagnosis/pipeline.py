"""Explains why pipeline ranks wait: for messages, for the schedule (the bubble), or for a slower stage.

The recorded step is compared with a step whose messages take no time, and with one whose stages also take equal time.
Each difference is the cost of one cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

import numpy as np

from headway import intervals
from headway.diagnosis.breakdown import NS_A_MS, RankTime
from headway.diagnosis.communication import Communications
from headway.diagnosis.findings import Finding, milliseconds, of_each_step
from headway.diagnosis.stragglers import UNKNOWN, Straggler
from headway.diagnosis.verdict import STANDS_OUT
from headway.graph.computation import Part
from headway.graph.recorded import both_ends
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule, times_without_messages
from headway.strategies.pipeline.stage_links import StageLinks, why_not_split
from headway.trace.events import Kind
from headway.trace.format import Trace

_PARTS = {Pass.FORWARD: Part.FORWARD, Pass.BACKWARD: Part.BACKWARD}
LEAST_GAIN = 0.02  # of a step


def split_advice(
    trace: Trace, schedule: PipelineSchedule, lasts_ms: Mapping[Action, float], step_ms: float
) -> str:
    """Says which modules to move between stages and the gain, with messages costing the same as now; "" if unknown."""
    replicas = trace.world_size // max(1, len(trace.stages)) if trace.stages_a_rank == 1 else 1
    if not trace.stages or why_not_split(trace.stages, stages_a_rank=trace.stages_a_rank, replicas=replicas):
        return ""
    sizes, ns_a_byte = _stage_messages(trace)
    if len(sizes) != len(trace.stages) - 1:
        return ""
    links = StageLinks(trace.stages, tuple(sizes))
    splits = links.splits(schedule.micro_batches, lambda stage, size: ns_a_byte[stage] * size)
    now_ms = _split_ms(schedule, lasts_ms)
    best = min(
        (
            (_split_ms(schedule, _with_moved_modules(links, split.ends, lasts_ms)), split.ends)
            for split in splits
        ),
        default=(now_ms, links.ends),
    )
    gain = (now_ms - best[0]) / step_ms
    if gain < LEAST_GAIN:
        return ""
    return (
        f"moving {links.moves(best[1])} would make a step {gain:.0%} faster, if messages cost the same as now"
    )


def _with_moved_modules(
    links: StageLinks, ends: tuple[int, ...], lasts_ms: Mapping[Action, float]
) -> dict[Action, float]:
    def took(action: Action) -> float:
        of_stages = [lasts_ms.get(action._replace(stage=stage), 0.0) for stage in range(len(ends))]
        return links.pass_of(ends, action.stage, _PARTS[action.kind], of_stages.__getitem__)

    return {action: took(action) for action in lasts_ms}


def _split_ms(schedule: PipelineSchedule, lasts_ms: Mapping[Action, float]) -> float:
    times = times_without_messages(schedule, lambda action: round(lasts_ms[action] * NS_A_MS))
    return times.total / NS_A_MS


def _stage_messages(trace: Trace) -> tuple[list[int], dict[int, float]]:
    """The median size of each stage boundary's messages in bytes, and the median ns per byte at each boundary."""
    stage_of = {rank: stage for stage, ranks in trace.ranks_of_stages.items() for rank in ranks}
    sizes: dict[int, list[int]] = defaultdict(list)
    took_ns: dict[int, list[float]] = defaultdict(list)
    for message in both_ends(trace):
        boundary = min(stage_of[message.sender], stage_of[message.receiver])
        sizes[boundary].append(message.sent.size_bytes)
        took_ns[boundary].append(
            (message.received.end_ns - message.begin_ns) / max(1, message.sent.size_bytes)
        )
    return [round(median(sizes[boundary])) for boundary in sorted(sizes)], {
        boundary: max(0.0, median(samples)) for boundary, samples in took_ns.items()
    }


EXPLAINED = ("communication", "straggler", "imbalance")
"""Causes that assume all ranks do the same work at the same time; they mean nothing in a pipeline."""
LONGER = 1.05  # times the others' computation: the rank is slower, not just later in the pipeline
_PASSES = {Kind.FORWARD_PASS: Pass.FORWARD, Kind.BACKWARD_PASS: Pass.BACKWARD}


def pipeline_findings(trace: Trace, steps: tuple[int, ...], step_ms: float) -> list[Finding]:
    """Findings on messages, the bubble and uneven stages of a step of ``step_ms``; empty without recorded passes."""
    ranks = [_passes_ms(trace, rank, steps) for rank in sorted(trace.events)]
    try:
        schedule = PipelineSchedule(
            tuple(tuple(passes) for passes in ranks),
            1 + max((action.micro_batch for passes in ranks for action in passes), default=-1),
        )
    except ValueError:  # a split backward, or passes that were not recorded
        return []
    lasts_ms = {action: took_ms for passes in ranks for action, took_ms in passes.items()}
    stages = range(schedule.stages)
    typical = {
        kind: mean(median(_lengths_ms(lasts_ms, kind, stage)) for stage in stages)
        for kind in (Pass.FORWARD, Pass.BACKWARD)
    }
    recorded_ms = _total_ms(schedule, lambda action: lasts_ms[action])
    even_ms = _total_ms(schedule, lambda action: typical[action.kind])
    busy_ms = sum(lasts_ms.values()) / len(ranks)
    findings = [
        _messages(trace, steps, step_ms, max(0.0, step_ms - recorded_ms)),
        _bubble(schedule, step_ms, max(0.0, min(recorded_ms, even_ms) - busy_ms)),
    ]
    if recorded_ms > even_ms:
        per_stage = [sum(median(_lengths_ms(lasts_ms, kind, stage)) for kind in typical) for stage in stages]
        advice = split_advice(trace, schedule, lasts_ms, step_ms) or "move layers to other stages"
        findings.append(_uneven(schedule, per_stage, step_ms, recorded_ms - even_ms, advice))
    return findings


def waits_for_messages(times: dict[int, RankTime], rows: Communications) -> bool:
    """Whether ranks wait mainly for messages, as in a pipeline."""
    waited_ns = messages_ns = 0
    for rank, time in times.items():
        messages = rows.where((rows.rank == rank) & np.isin(rows.kind.astype(str), (Kind.SEND, Kind.RECEIVE)))
        waits = intervals.join(time.exposed, time.straggling)
        waits = intervals.intersect(waits, intervals.union(time.step_start_ns, time.step_end_ns))
        waited_ns += intervals.length_ns(waits)
        spans = intervals.union(messages.enqueue_ns, messages.end_ns)
        messages_ns += intervals.length_ns(intervals.intersect(waits, spans))
    return 2 * messages_ns > waited_ns


def with_bubble_finding(
    findings: list[Finding], times: dict[int, RankTime], stragglers: Sequence[Straggler], step_ms: float
) -> list[Finding]:
    """Replaces stragglers by a pipeline bubble, for jobs that wait mainly for messages and do not record stages.

    In a pipeline each rank waits for the previous stage, so only a rank that also computes longer is a straggler.
    """
    worst = stragglers[0] if stragglers else None
    if worst is not None and worst.cause != UNKNOWN and worst.own_ms > LONGER * worst.others_ms:
        return findings
    steps = sum(len(time.step_start_ns) for time in times.values())
    late_ns = sum(int(time.per_step(time.straggling).sum()) for time in times.values())
    cost_ms = late_ns / steps / NS_A_MS
    sentence = (
        f"The pipeline's bubble costs {of_each_step(cost_ms, step_ms)} on average: ranks wait for messages that other "
        "stages have not sent yet; split batches into more micro-batches, or give stages equal work."
    )
    bubble = Finding("pipeline bubble", cost_ms, sentence, stands_out=cost_ms >= STANDS_OUT * step_ms)
    return [finding for finding in findings if finding.cause not in ("straggler", "moving_imbalance")] + [
        bubble
    ]


def _passes_ms(trace: Trace, rank: int, steps: tuple[int, ...]) -> dict[Action, float]:
    """The median duration of each pass of a rank in ms, in the order of the first step."""
    seen: dict[Action, list[float]] = defaultdict(list)
    rows = trace.events[rank].of_kind(*_PASSES)
    for row in sorted(rows, key=lambda row: (row.step, row.start_ns)):
        if row.step in steps and row.stage >= 0:
            action = Action(_PASSES[row.kind], row.stage, row.micro_batch)
            seen[action].append(row.duration_ns / NS_A_MS)
    return {action: median(times) for action, times in seen.items()}


def _lengths_ms(lasts_ms: dict[Action, float], kind: Pass, stage: int) -> list[float]:
    return [took for action, took in lasts_ms.items() if action.kind is kind and action.stage == stage]


def _total_ms(schedule: PipelineSchedule, lasts_ms: Callable[[Action], float]) -> float:
    return times_without_messages(schedule, lambda action: round(lasts_ms(action) * NS_A_MS)).total / NS_A_MS


def _messages(trace: Trace, steps: tuple[int, ...], step_ms: float, cost_ms: float) -> Finding:
    took_ms: dict[tuple[int, int], list[float]] = defaultdict(list)
    for message in both_ends(trace):
        if message.sent.step in steps:
            took_ns = message.received.end_ns - message.begin_ns
            took_ms[message.sender, message.receiver].append(took_ns / NS_A_MS)
    slowest = max(took_ms, key=lambda pair: median(took_ms[pair]), default=(0, 0))
    slowest_ms = median(took_ms.get(slowest, [0.0]))
    return Finding(
        "pipeline messages",
        cost_ms,
        f"Messages between stages cost {of_each_step(cost_ms, step_ms)}: ranks have nothing to compute while they are "
        f"in flight (the slowest: {milliseconds(slowest_ms)} from rank {slowest[0]} to rank {slowest[1]}); compute "
        "other micro-batches meanwhile, with a schedule in groups (headway optimize).",
        stands_out=cost_ms > STANDS_OUT * step_ms,
    )


def _bubble(schedule: PipelineSchedule, step_ms: float, cost_ms: float) -> Finding:
    return Finding(
        "pipeline bubble",
        cost_ms,
        f"The pipeline's bubble costs {of_each_step(cost_ms, step_ms)}: with {schedule.parts}, ranks wait for each "
        "other even if messages take no time; split batches into more micro-batches.",
        stands_out=cost_ms > STANDS_OUT * step_ms,
    )


def _uneven(
    schedule: PipelineSchedule, per_stage_ms: list[float], step_ms: float, cost_ms: float, advice: str
) -> Finding:
    worst = max(range(len(per_stage_ms)), key=lambda stage: per_stage_ms[stage])
    rank = schedule.rank_of_stage[worst]
    return Finding(
        "uneven stages",
        cost_ms,
        f"Stages are uneven: stage {worst} (rank {rank}) takes {milliseconds(per_stage_ms[worst])} per micro-batch, the "
        f"mean stage {milliseconds(mean(per_stage_ms))}; this costs {of_each_step(cost_ms, step_ms)}; {advice}.",
        (rank,),
        stands_out=cost_ms > STANDS_OUT * step_ms,
    )
