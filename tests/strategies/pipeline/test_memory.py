"""What ranks of a pipeline hold: the law of activations in flight, and what is there besides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.job import Job
from headway.model import HalvedBackward, ModelSpec, ParameterSpec, StageMemory
from headway.scheduling.pipeline.orders import ORDERS, grouped
from headway.scheduling.pipeline.schedule import PipelineSchedule, RecordedPipelineSchedule
from headway.strategies.pipeline.memory import peak_bytes

KEPT = 10**6
NOTHING: dict[str, int] = dict.fromkeys(
    (
        "forward_bytes", "kept_bytes", "outputs_bytes", "first_backward_bytes", "backward_bytes", "gradient_bytes",
    ), 0
)  # fmt: skip
PARAMETERS = ModelSpec(parameters=(ParameterSpec(name="w", shape=(0,), dtype="float32", module=""),))
EVERY_ORDER = [
    schedule
    for stages in (2, 3, 4, 8)
    for count in (1, 2, 5, 8, 16)
    for schedule in (
        *(order(stages, count) for order in ORDERS.values()),
        *(grouped(stages, count, size) for size in (2, 3)),
    )
]


def a_job(stages: int, boundary: int = 0, **held: Any) -> Job:
    memory = StageMemory.model_validate({**NOTHING, **held})
    model = PARAMETERS.model_copy(update={"stage_memory": memory})
    return Job((model,) * stages, stages, boundary_bytes=(boundary,) * (stages - 1))


def held_bytes(job: Job, schedule: PipelineSchedule, stage: int) -> int:
    """Beyond the parameters."""
    found = peak_bytes(job, schedule, stage)
    assert found is not None
    return found - PARAMETERS.size_bytes


@pytest.mark.parametrize("schedule", EVERY_ORDER, ids=lambda each: f"{each.stages}-{each.micro_batches}")
def test_activations_in_flight_are_the_law(schedule: PipelineSchedule) -> None:
    job = a_job(schedule.stages, forward_bytes=KEPT, kept_bytes=KEPT)
    for stage in range(schedule.stages):
        assert held_bytes(job, schedule, stage) == schedule.most_in_flight(stage) * KEPT


@pytest.mark.parametrize("schedule", EVERY_ORDER, ids=lambda each: f"{each.stages}-{each.micro_batches}")
def test_what_is_received_is_held_until_it_has_been_used(schedule: PipelineSchedule) -> None:
    """No more than is in flight and posted, a message each way; and never less than what is in flight."""
    job = a_job(schedule.stages, boundary=1000)
    for stage in range(schedule.stages):
        flying, count = schedule.most_in_flight(stage), schedule.micro_batches
        neighbours = (stage > 0) + (stage < schedule.stages - 1)
        most = flying * neighbours + schedule.receive_buffers * neighbours + (count if stage else 0)
        least = min(count, flying) if stage else 1
        assert least * 1000 <= held_bytes(job, schedule, stage) <= most * 1000


def test_gradients_are_made_once_and_added_to() -> None:
    schedule = grouped(2, 4, 1)
    made = a_job(2, gradient_bytes=500, first_backward_bytes=600, backward_bytes=200)
    assert held_bytes(made, schedule, 0) == 500 + 200
    assert held_bytes(made, grouped(2, 1, 1), 0) == 600
    kept = a_job(2, gradient_bytes=500, first_backward_bytes=600, backward_bytes=200, gradients_kept=True)
    assert held_bytes(kept, schedule, 0) == 500 + 200


def test_outputs_are_kept_until_they_are_put_together() -> None:
    job = a_job(2, kept_bytes=KEPT, forward_bytes=KEPT, outputs_bytes=300_000, end_bytes=4 * 300_000)
    schedule = grouped(2, 4, 1)
    assert held_bytes(job, schedule, 1) == 4 * 300_000 + 4 * 300_000
    assert held_bytes(a_job(2, batch_bytes=77, update_bytes=5, gradient_bytes=9), schedule, 1) == 77 + 5 + 9


def test_halved_backwards_hold_what_was_put_off() -> None:
    halves = HalvedBackward(input_bytes=40, put_off_bytes=40, first_weight_bytes=0, weight_bytes=0)
    schedule = ORDERS["zero-bubble"](3, 8)
    seen = a_job(3, kept_bytes=KEPT, forward_bytes=KEPT, halves=halves)
    assert held_bytes(seen, schedule, 2) == 3 * KEPT + 3 * 40  # two are put off, and a third is
    unseen = a_job(3, kept_bytes=KEPT, forward_bytes=KEPT, weighted_bytes=40)
    assert held_bytes(unseen, schedule, 2) == held_bytes(seen, schedule, 2)
    assert held_bytes(unseen, schedule, 0) == 3 * KEPT, "torch's first stage puts all of a backward off"


def test_a_recorded_order_held_what_was_seen() -> None:
    schedule = grouped(2, 4, 1)
    recorded = RecordedPipelineSchedule(schedule.ranks, schedule.micro_batches)
    job = a_job(2, step_bytes=1234, received_bytes=100, batch_bytes=10, kept_bytes=KEPT)
    assert held_bytes(job, recorded, 0) == 1344


def test_what_was_not_watched_is_left_to_the_footprint() -> None:
    job = replace(a_job(2), stages=(ModelSpec(parameters=()),) * 2)
    assert peak_bytes(job, grouped(2, 4, 1), 0) is None
