"""Computes the peak memory of every rank of a job."""

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
    """The highest peak memory (bytes) of any rank."""
    return max(rank_peaks_bytes(job, strategy, schedule))


def rank_peaks_bytes(job: Job, strategy: Strategy, schedule: Schedule) -> tuple[int, ...]:
    """The peak memory of each rank; for ranks with several stages the sum over them, an upper bound."""
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
    """The peak memory (bytes) of each stage of ``job``.

    Parameters, buffers, the optimizer's state and the strategy's own memory exist all the time. Backward frees
    activations and allocates gradients; the update may need more. Without measured passes (``ModelSpec.pass_memory``,
    ``stage_memory``), activations are assumed to be freed evenly.
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
    """Whether some stage's memory was not measured: sizes of module outputs then stand in for activations."""
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
