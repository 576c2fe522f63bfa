"""What a diagnosis has besides causes: the job, its buckets, modules and memory, and what was not observed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.synthetic import MS, SyntheticJob, synthetic_trace, trace_of, with_ranks, without_ranks

from headway import files
from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.breakdown import mean_breakdown, rank_time
from headway.diagnosis.buckets import exposed_ns
from headway.diagnosis.communication import match
from headway.diagnosis.comparison import side_by_side
from headway.diagnosis.details import Details, contention
from headway.model import ModelSpec, ModuleMemory, ParameterSpec, PassMemory
from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

JOB = SyntheticJob(gbps=0.5, slow={(2, "backward"): 6.0})
BUCKETS = tuple((f"{module}.weight",) for module in reversed(JOB.modules))


def bucketed(job: SyntheticJob) -> Trace:
    """The job's trace, which says what its buckets hold."""
    trace = synthetic_trace(job)
    return with_ranks(trace, {rank: {"buckets": BUCKETS} for rank in trace.events})


def details_of(found: Diagnosis) -> Details:
    assert found.details is not None
    return found.details


def test_buckets_say_when_and_what_is_exposed() -> None:
    found = diagnose(bucketed(JOB))
    buckets = details_of(found).buckets
    assert [one.bucket for one in buckets] == [0, 1, 2, 3]
    assert [one.parameters for one in buckets] == list(BUCKETS)
    assert [one.size_bytes for one in buckets] == list(JOB.bucket_bytes)
    for one in buckets:
        assert one.first_ready_ms is not None
        assert one.first_ready_ms == one.last_ready_ms
        assert one.last_ready_ms <= one.launch_ms < one.end_ms <= found.step_ms
    exposed_ms = mean_breakdown(list(found.breakdown.values())).exposed_communication
    assert sum(one.exposed_ms for one in buckets) == pytest.approx(exposed_ms)
    assert exposed_ms > 1


def test_what_several_collectives_hold_up_counts_for_the_one_that_ends_first() -> None:
    rows = [
        Event(Kind.STEP, "", Stream.COMPUTE, 0, 0, 100 * MS),
        Event(Kind.WAIT, "", Stream.COMPUTE, 0, 0, 50 * MS),
    ]
    for bucket, (start, end) in enumerate(((0, 30), (10, 20), (20, 60), (70, 80))):
        rows.append(
            Event(
                Kind.COLLECTIVE, "all_reduce", Stream.COMMUNICATION, 0, start * MS, (end - start) * MS,
                enqueue_ns=start * MS, group="0", sequence=bucket, size_bytes=4, bucket=bucket,
            )
        )  # fmt: skip
    trace = trace_of({0: rows})
    own = match(trace)
    time = rank_time(0, trace.events[0], (0,), own)
    by_bucket = np.zeros(4, dtype=np.int64)
    by_bucket[own.bucket] = exposed_ns(time, own)
    assert (by_bucket // MS).tolist() == [20, 10, 20, 0]


def test_modules_count_without_those_inside_and_without_waits() -> None:
    def span(kind: str, name: str, start: int, end: int) -> Event:
        return Event(kind, name, Stream.COMPUTE, 0, start * MS, (end - start) * MS)

    rows = [
        span(Kind.STEP, "", 0, 100), span(Kind.FORWARD, "outer", 0, 40), span(Kind.FORWARD, "outer.in", 10, 30),
        span(Kind.FORWARD, "outer.in", 30, 35), span(Kind.WAIT, "", 12, 16), span(Kind.BACKWARD, "outer.in", 50, 70),
        span(Kind.BACKWARD, "(loss)", 48, 50),
    ]  # fmt: skip
    modules = details_of(diagnose(trace_of({0: rows}))).modules
    assert [(one.name, one.forward_ms, one.backward_ms, one.calls) for one in modules] == [
        ("outer.in", 21.0, 20.0, 2.0),
        ("outer", 15.0, 0.0, 1.0),
        ("(loss)", 0.0, 2.0, 0.0),
    ]


def watched() -> Trace:
    """A trace whose model's pass was watched."""
    parameters = tuple(
        ParameterSpec(name=f"{module}.weight", shape=(250,), dtype="float32", module=module)
        for module in JOB.modules
    )
    calls = tuple(
        ModuleMemory(
            module=module,
            begin_bytes=at * 100,
            peak_bytes=at * 100 + 300,
            end_bytes=at * 100 + 100,
            output_bytes=50,
        )
        for at, module in enumerate(JOB.modules)
    )
    memory = PassMemory(
        forward_bytes=700,
        backward=tuple((parameter.name, 900) for parameter in reversed(parameters)),
        update_bytes=100,
        modules=calls,
    )
    model = ModelSpec(parameters=parameters, pass_memory=memory, optimizer_state_bytes=8000, class_name="Net")
    return replace(bucketed(JOB), model=model)


def test_memory_adds_up_over_a_step() -> None:
    found = details_of(diagnose(watched()))
    (memory,) = found.memory
    assert memory.constant_bytes == {"parameters": 4000, "optimizer state": 8000, "DDP's buckets": 4000}
    assert memory.peak is not None
    assert memory.peak_bytes == 16000 + 4000 + 100
    assert memory.peak[1:3] == (4000, 100)
    assert memory.peak.what == "update"
    assert list(memory.points) == sorted(memory.points, key=lambda point: point.ms)
    assert max(point.working_bytes for point in memory.points) == 900
    assert {one.name: one.kept_bytes for one in found.modules} == dict.fromkeys(JOB.modules, 100)
    assert not any("Memory" in sentence for sentence in found.not_observed)


def test_the_job_is_named_and_what_was_not_observed() -> None:
    trace = watched()
    found = details_of(diagnose(trace))
    assert (found.job.model, found.job.parameters, found.job.model_bytes) == ("Net", 1000, 4000)
    assert (found.job.world_size, len(found.job.hosts), found.job.detail) == (4, 4, "modules")
    assert found.job.versions == ("2.13.0",)
    part = details_of(diagnose(without_ranks(replace(trace, model=ModelSpec(parameters=())), 1, 3)))
    said = " ".join(part.not_observed)
    assert "2 of 4 ranks: no file for ranks 1, 3." in said
    for what in ("Memory", "The model", "Operators", "Links and cores"):
        assert what in said
    json.loads(files.dump_json(diagnose(trace).to_document()))


@pytest.mark.parametrize(
    ("threads", "cores", "load", "says"),
    [
        (1, ((0, 3),), 4.0, ""),
        (1, ((0, 0),), 1.0, "use 4 threads on 1 cores"),
        (4, ((0, 3),), 4.0, "16 threads on 4 cores"),
        (1, ((0, 3),), 9.5, "load 9.5 on 4 cores"),
        (0, (), None, ""),
    ],
)
def test_contention_is_named(
    threads: int, cores: tuple[tuple[int, int], ...], load: float | None, says: str
) -> None:
    trace = synthetic_trace(SyntheticJob(ranks_a_host=4))
    told = {"threads": threads, "cores": cores, "load": load}
    ranks = with_ranks(trace, dict.fromkeys(trace.events, told)).manifest.ranks
    assert says in contention(ranks)
    assert bool(says) == bool(contention(ranks))


def test_ranks_with_cores_of_their_own_do_not_contend() -> None:
    trace = synthetic_trace(SyntheticJob(ranks_a_host=4))
    own = {rank: {"threads": 2, "cores": ((2 * rank, 2 * rank + 1),), "load": 8.0} for rank in trace.events}
    assert contention(with_ranks(trace, own).manifest.ranks) == ""


def test_two_recordings_lie_side_by_side() -> None:
    before = diagnose(bucketed(JOB))
    after = diagnose(
        with_ranks(
            bucketed(replace(JOB, forward_ms=15.0, bucket_bytes=(2_000_000,) * 2)), {0: {"backend": "nccl"}}
        )
    )
    pair = side_by_side([before], after)
    changed = {one.name: (one.before, one.after) for one in pair.changed}
    assert changed == {"Parameters": (1_000_000, 4000), "Backend": (("gloo",), ("nccl", "gloo"))}
    assert [(one.before is None, one.after is None) for one in pair.buckets] == [
        (False, False), (False, False), (False, True), (False, True),
    ]  # fmt: skip
    assert pair.modules[0].before is not None
    assert pair.modules[0].after is not None
    assert pair.modules[0].after.ms > pair.modules[0].before.ms
    assert len(pair.steps_after.steps_ms) == JOB.steps
    several = side_by_side([before, after, before], after)
    assert several.typical in (0, 2)
    assert several.parts_before.total_ms == pytest.approx((2 * before.step_ms + after.step_ms) / 3)
    assert len(several.steps_before) == 3
