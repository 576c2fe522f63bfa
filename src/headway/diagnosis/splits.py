"""Which modules another stage of a recorded pipeline should have, where modules of stages were timed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

from headway.diagnosis.breakdown import NS_A_MS
from headway.graph.recorded_messages import both_ends
from headway.graph.timeline import Part
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule
from headway.scheduling.pipeline.timing import times_without_messages
from headway.strategies.pipeline.stage_links import StageLinks, why_not_split
from headway.trace.format import Trace

_PARTS = {Pass.FORWARD: Part.FORWARD, Pass.BACKWARD: Part.BACKWARD}
LEAST_GAIN = 0.02  # of a step


def split_advice(
    trace: Trace, schedule: PipelineSchedule, lasts_ms: Mapping[Action, float], step_ms: float
) -> str:
    """Which modules to move and what that would gain, if messages cost a step what they cost now; "" if not known."""
    replicas = trace.world_size // max(1, len(trace.stages)) if trace.stages_a_rank == 1 else 1
    if not trace.stages or why_not_split(trace.stages, stages_a_rank=trace.stages_a_rank, replicas=replicas):
        return ""
    sizes, ns_a_byte = _stage_messages(trace)
    if len(sizes) != len(trace.stages) - 1:
        return ""
    links = StageLinks(trace.stages, tuple(sizes))
    found = links.splits(schedule.micro_batches, lambda stage, size: ns_a_byte[stage] * size)
    now_ms = _split_ms(schedule, lasts_ms)
    best = min(
        ((_split_ms(schedule, _with(links, each.ends, lasts_ms)), each.ends) for each in found),
        default=(now_ms, links.ends),
    )
    gain = (now_ms - best[0]) / step_ms
    if gain < LEAST_GAIN:
        return ""
    return (
        f"moving {links.moves(best[1])} would make a step {gain:.0%} faster, if messages cost as much as now"
    )


def _with(links: StageLinks, ends: tuple[int, ...], lasts_ms: Mapping[Action, float]) -> dict[Action, float]:
    def took(action: Action) -> float:
        of_stages = [lasts_ms.get(action._replace(stage=stage), 0.0) for stage in range(len(ends))]
        return links.pass_of(ends, action.stage, _PARTS[action.kind], of_stages.__getitem__)

    return {action: took(action) for action in lasts_ms}


def _split_ms(schedule: PipelineSchedule, lasts_ms: Mapping[Action, float]) -> float:
    times = times_without_messages(schedule, lambda action: round(lasts_ms[action] * NS_A_MS))
    return times.total / NS_A_MS


def _stage_messages(trace: Trace) -> tuple[list[int], dict[int, float]]:
    """The usual bytes of what each stage but the last hands on, and what a byte of it takes there or back."""
    stage_of = {rank: stage for stage, ranks in trace.ranks_of_stages.items() for rank in ranks}
    sizes: dict[int, list[int]] = defaultdict(list)
    took_ns: dict[int, list[float]] = defaultdict(list)
    for message in both_ends(trace):
        boundary = min(stage_of[message.sender], stage_of[message.receiver])
        sizes[boundary].append(message.sent.size_bytes)
        took_ns[boundary].append(
            (message.received.end_ns - message.begin_ns) / max(1, message.sent.size_bytes)
        )
    return [round(median(sizes[each])) for each in sorted(sizes)], {
        boundary: max(0.0, median(each)) for boundary, each in took_ns.items()
    }
