"""How many bytes a rank needs at its peak, by what it holds when."""

from __future__ import annotations

from headway.job import Job
from headway.model import ModelSpec
from headway.plugins import asking
from headway.scheduling.pipeline.replicated import ReplicatedSchedule
from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.scheduling.schedule import Schedule
from headway.strategies.base import Strategy
from headway.strategies.footprint import Footprint, constant_bytes, held_moments
from headway.strategies.registry import plugin_of


def peak_bytes(job: Job, strategy: Strategy, schedule: Schedule) -> int:
    """The most that one rank of ``job`` holds at once: the most of ``rank_peaks_bytes``."""
    return max(rank_peaks_bytes(job, strategy, schedule))


def rank_peaks_bytes(job: Job, strategy: Strategy, schedule: Schedule) -> tuple[int, ...]:
    """The most that a rank of each stage holds; of ranks with several stages, the sum over these, which is no less."""
    peaks_bytes = stage_peaks_bytes(job, strategy, schedule)
    if isinstance(schedule, ReplicatedSchedule):
        schedule = schedule.pipeline
    if not isinstance(schedule, PipelineSchedule) or len(schedule.ranks) == schedule.stages:
        return peaks_bytes
    return tuple(
        sum(
            stage_bytes
            for stage_bytes, at in zip(peaks_bytes, schedule.rank_of_stage, strict=True)
            if at == rank
        )
        for rank in range(len(schedule.ranks))
    )


def stage_peaks_bytes(job: Job, strategy: Strategy, schedule: Schedule) -> tuple[int, ...]:
    """The most that a rank of each stage of ``job`` holds at once.

    Parameters, frozen ones too, buffers, the optimizer's state and what ``strategy`` holds exist all the time. During
    backward activations are released and gradients are allocated; then the update may need more. If no pass was watched
    (``ModelSpec.pass_memory``, ``stage_memory``), activations are assumed to be released evenly.
    """
    plugin = plugin_of(strategy)
    peaks_bytes = []
    for stage, model in enumerate(job.stages):
        with asking("strategy", strategy):
            own_bytes = plugin.peak_bytes(job, schedule, stage)
            if own_bytes is None:
                own_bytes = _peak_bytes(model, plugin.footprint(job, schedule, stage))
        peaks_bytes.append(own_bytes)
    return tuple(peaks_bytes)


def peak_is_rough(job: Job, strategy: Strategy, schedule: Schedule) -> bool:
    """Whether no pass was watched of some stage: what modules put out stands for what they keep."""
    plugin = plugin_of(strategy)
    return any(
        model.pass_memory is None and plugin.peak_bytes(job, schedule, stage) is None
        for stage, model in enumerate(job.stages)
    )


def _peak_bytes(model: ModelSpec, held: Footprint) -> int:
    earlier = (held.passes_in_flight - 1) * model.activation_bytes
    most_bytes = max(
        held_moment.gradient_bytes + held_moment.working_bytes for held_moment in held_moments(model, held)
    )
    return constant_bytes(model, held) + earlier + most_bytes
