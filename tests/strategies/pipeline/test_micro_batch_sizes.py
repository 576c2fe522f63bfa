"""Jobs between two recorded numbers of micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.model import HalvedBackward, ModelSpec, ParameterSpec, StageMemory
from headway.strategies.pipeline.micro_batch_sizes import counts_between, first_difference, interpolated
from headway.strategies.pipeline.stage_times import StageTimes, micro_batches

BATCH, STAGES = 48, 2


def memory(count: int) -> StageMemory:
    """Every quantity a constant of its own and so much a sample."""
    size = BATCH // count
    of = {name: 100 * place + place * size for place, name in enumerate(StageMemory.model_fields, start=1)}
    halves = HalvedBackward(
        input_bytes=7 * size, put_off_bytes=5 + size, first_weight_bytes=11, weight_bytes=3 * size
    )
    return StageMemory.model_validate({**of, "halves": halves, "gradients_kept": False})


def a_job(count: int, constant_ns: int = 1000, sample_ns: int = 100) -> Job:
    size = BATCH // count
    parameters = (ParameterSpec(name="w", shape=(4,), dtype="float32", module=""),)
    stage = ModelSpec(parameters=parameters, activation_bytes=40 * size, stage_memory=memory(count))
    timelines = {}
    for rank in range(STAGES):
        items = [Item(Part.INPUT, duration_ns=17)]
        for kind, factor in ((Part.FORWARD, 1), (Part.BACKWARD, 2)):
            for number in range(count):
                ns = factor * (constant_ns + sample_ns * size)
                items.append(Item(kind, duration_ns=ns, stage=rank, micro_batch=number))
                if kind == Part.BACKWARD and number == count - 1:
                    items.append(Item(Point.READY, "w", stage=rank, micro_batch=number))
        items.append(Item(Part.OPTIMIZER, duration_ns=23))
        timelines[rank] = tuple(Timeline(rank, step, tuple(items)) for step in (3, 4))
    return Job((stage,) * STAGES, STAGES, computation=Computation(timelines), boundary_bytes=(8 * size,))


@pytest.mark.parametrize("count", [3, 4, 6, 8, 12, 16])
def test_what_is_affine_is_found_again(count: int) -> None:
    """Times, memory and messages are what a recording of that number would have had."""
    found, expected = interpolated(a_job(2), a_job(24), count).job, a_job(count)
    assert micro_batches(found.steps) == count
    for rank, own in expected.steps.timelines.items():
        for one, other in zip(found.steps.timelines[rank], own, strict=True):
            mine, wanted = StageTimes.of(one), StageTimes.of(other)
            assert mine.passes_ns == wanted.passes_ns
            assert mine.before == wanted.before
            assert mine.after == wanted.after
            assert [item.kind for item in mine.last[rank].items] == [Part.BACKWARD, Point.READY]
            assert mine.last[rank].micro_batch == count - 1
    assert found.boundary_bytes == expected.boundary_bytes
    assert found.stages == expected.stages


def test_how_far_times_may_be_off() -> None:
    """Nothing where a pass takes so much a sample, and at most what larger or smaller micro-batches leave open."""
    assert interpolated(a_job(2, constant_ns=0), a_job(8, constant_ns=0), 4).share == pytest.approx(
        0, abs=1e-3
    )
    constant = interpolated(a_job(2, sample_ns=0), a_job(8, sample_ns=0), 4)
    assert constant.share == pytest.approx(0, abs=1e-3)
    mixed = interpolated(a_job(2, 2400, 100), a_job(8, 2400, 100), 4)
    taken, least, most = 2400 + 1200, max(2400 + 600, (2400 + 2400) / 2), min(2400 + 2400, 2 * (2400 + 600))
    assert mixed.share == pytest.approx(max(taken - least, most - taken) / taken)


def test_numbers_that_certainly_split_the_batch() -> None:
    assert list(counts_between([8, 2])) == [(4, 2, 8)]
    assert list(counts_between([4, 16, 8])) == []
    assert list(counts_between([4, 6])) == []
    assert [count for count, *_ in counts_between([2, 24])] == [3, 4, 6, 8, 12]
    assert list(counts_between([8])) == []


def test_what_differs_is_named() -> None:
    job = a_job(4)
    assert first_difference(job, a_job(8)) is None
    other = replace(a_job(8), boundary_bytes=(8 * BATCH,))
    assert (first_difference(job, other) or ("",))[0] == "the batch, by what stages hand on of all of it"
    larger = job.stages[0].model_copy(
        update={"parameters": (ParameterSpec(name="v", shape=(5,), dtype="float32", module=""),)}
    )
    what, mine, others = first_difference(job, replace(a_job(8), stages=(job.stages[0], larger))) or (
        "",
        "",
        "",
    )
    assert what == "the parameters of stages"
    assert "1 parameters in 20 bytes" in others
    assert "20 bytes" not in mine
