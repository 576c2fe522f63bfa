"""Two recordings held against each other: what changed, where, and whether that exceeds noise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis.strategies import any_traces, healthy_jobs
from tests.diagnosis.truth import JOB, found_in
from tests.exhaustive import examples
from tests.synthetic import MS, Extra, SyntheticJob, synthetic_trace, trace_of

from headway import files
from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.breakdown import PARTS
from headway.diagnosis.comparison import ONE_RUN, compare, job_differences
from headway.errors import TraceError
from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

BASE = found_in(JOB)
AGAIN = replace(JOB, seed=1)  # the same job, recorded once more


@settings(max_examples=examples(30), deadline=None)
@given(any_traces())
def test_a_trace_did_not_change_from_itself(trace: Trace) -> None:
    found = diagnose(trace)
    same = compare(found, found, threshold=0.0)
    assert not same.regressed
    assert same.change == 0
    assert set(same.parts_ms.values()) == {0.0}
    assert same.new_causes == same.gone_causes == ()
    assert same.sentence.startswith(("No change", "Cannot compare a single step"))
    assert same.sentence.isprintable()
    json.loads(files.dump_json(same.to_document()))


def test_a_second_recording_of_the_same_job_is_no_change() -> None:
    same = compare(found_in(AGAIN), BASE)
    assert not same.regressed
    assert same.sentence.startswith("No change beyond noise: the step went from 36.")
    assert same.noise_ms == pytest.approx(ONE_RUN * BASE.step_ms)
    assert "With a single baseline, runs are assumed to vary by 10 %" in same.sentence


def test_several_baselines_say_by_how_much_runs_differ() -> None:
    runs = [found_in(replace(JOB, seed=seed)) for seed in (1, 2, 3)]
    steady = compare(found_in(replace(JOB, seed=4)), *runs)
    assert steady.sentence.startswith("No change beyond noise")
    assert 0 < steady.noise_ms < 0.03 * BASE.step_ms
    assert "With a single baseline" not in steady.sentence
    slightly = found_in(replace(AGAIN, forward_ms=JOB.forward_ms + 2.5))
    assert compare(slightly, *runs).regressed, "7 % are more than these runs differ"
    assert not compare(slightly, BASE).regressed, "which one of them does not show"
    loaded = [*runs, found_in(replace(JOB, forward_ms=2 * JOB.forward_ms))]  # the same job on a busy machine
    assert not compare(found_in(replace(JOB, forward_ms=1.8 * JOB.forward_ms)), *loaded).regressed


def test_one_recording_of_each_does_not_tell_load_from_change() -> None:
    slower = found_in(replace(AGAIN, forward_ms=16.0))
    for new, old in ((slower, BASE), (BASE, slower)):
        assert "machine load may change more: pass --baseline several times." in compare(new, old).sentence


@settings(max_examples=examples(30), deadline=None)
@given(healthy_jobs, st.integers(0, 1000))
def test_noise_is_no_regression(job: SyntheticJob, seed: int) -> None:
    assert not compare(found_in(replace(job, seed=seed)), found_in(job)).regressed


@pytest.mark.parametrize(
    ("change", "part", "says"),
    [
        ({"forward_ms": 16.0}, "computation", "in computation"),
        ({"input_ms": 9.0}, "input", "waiting for input"),
        ({"optimizer_ms": 8.0}, "optimizer", "in the optimizer"),
        ({"rest_ms": 8.0}, "rest", "outside the training passes"),
        ({"bucket_bytes": (4_500_000,) * 4}, "exposed_communication", "waiting for communication"),
        ({"slow": {(2, "forward"): 9.0}}, "straggler_wait", "waiting for other ranks"),
    ],
)
def test_what_became_slower_is_named(change: dict[str, object], part: str, says: str) -> None:
    slower = found_in(replace(AGAIN, **change))  # type: ignore[arg-type]
    worse = compare(slower, BASE, threshold=0.05)
    assert worse.regressed
    assert max(worse.parts_ms, key=lambda one: worse.parts_ms[one]) == part
    assert worse.sentence.startswith(f"Slower by {100 * worse.change:.0f} %: the step went from 36.")
    assert f"most of it {says} (+" in worse.sentence
    assert "this is above the threshold of 5 %. " in worse.sentence
    assert sum(worse.parts_ms.values()) == pytest.approx(slower.step_ms - BASE.step_ms)

    tolerated = compare(slower, BASE, threshold=worse.change + 0.01)
    assert not tolerated.regressed
    assert "this is within the threshold of" in tolerated.sentence

    better = compare(BASE, slower)
    assert not better.regressed
    assert better.sentence.startswith("Faster by ")
    assert f"most of it {says} (-" in better.sentence


def test_causes_that_came_and_went_are_told() -> None:
    slower = found_in(replace(AGAIN, slow={(2, "forward"): 9.0}))
    worse = compare(slower, BASE)
    assert (worse.new_causes, worse.gone_causes) == (("straggler",), ())
    better = compare(BASE, slower)
    assert (better.new_causes, better.gone_causes) == ((), ("straggler",))


def test_what_noise_may_explain_is_no_regression() -> None:
    # One step of 8 takes five times as long: the mean is 50 % longer, and nothing is sure.
    spiked = found_in(replace(AGAIN, steps=8, extras=(Extra(0, "rest", 150.0, (5,)),)))
    same = compare(spiked, found_in(replace(JOB, steps=8)), threshold=0.05)
    assert same.change > 0.4
    assert not same.regressed
    assert same.sentence.startswith("No change beyond noise")


def test_one_step_tells_nothing() -> None:
    one = found_in(replace(JOB, steps=1, forward_ms=100.0))
    for new, old in ((one, BASE), (BASE, one), (one, found_in(replace(JOB, steps=1)))):
        comparison = compare(new, old)
        assert not comparison.regressed
        assert comparison.sentence.startswith("Cannot compare a single step: the step went from ")


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_other_numbers_of_ranks_can_be_compared(world_size: int) -> None:
    other = found_in(replace(AGAIN, world_size=world_size, forward_ms=20.0))
    worse = compare(other, BASE)
    assert worse.regressed
    assert worse.parts_ms["computation"] == pytest.approx(10.0, abs=1.0)


def test_steps_without_length_can_be_compared() -> None:
    nothing = diagnose(
        trace_of({0: [Event(Kind.STEP, "", Stream.COMPUTE, step, step * MS, 0) for step in range(3)]})
    )
    for new, old in ((nothing, BASE), (BASE, nothing), (nothing, nothing)):
        comparison = compare(new, old)
        assert not comparison.regressed or new is BASE
        json.loads(files.dump_json(comparison.to_document()))


def test_the_document_keeps_its_contract() -> None:
    slower: Diagnosis = found_in(replace(AGAIN, slow={(2, "forward"): 9.0}))
    document = compare(slower, BASE, threshold=0.02).to_document()
    assert set(document) == {
        "sentence", "regressed", "baseline_step_ms", "change", "noise_ms", "baselines", "threshold", "parts_ms",
        "new_causes", "gone_causes",
    }  # fmt: skip
    assert document["regressed"] is True
    assert document["threshold"] == 0.02
    assert set(document["parts_ms"]) == set(PARTS)
    assert document["change"] == pytest.approx(slower.step_ms / BASE.step_ms - 1, abs=1e-6)


def test_jobs_that_are_not_alike_are_told_and_other_frameworks_refused() -> None:
    trace = synthetic_trace(JOB)
    assert job_differences(trace, synthetic_trace(AGAIN)) == ""
    wider = synthetic_trace(replace(JOB, world_size=JOB.world_size + 1))
    assert job_differences(wider, trace) == (
        f"These are not recordings of the same job: {JOB.world_size + 1} ranks against {JOB.world_size}."
    )
    other = replace(trace, model=trace.model.model_copy(update={"parameters": trace.model.parameters[1:]}))
    assert "different parameters" in job_differences(trace, other)
    foreign = replace(trace, manifest=trace.manifest.model_copy(update={"framework": "mxnet"}))
    with pytest.raises(
        TraceError, match="the baseline was recorded with another framework; got mxnet; expected pytorch"
    ):
        job_differences(trace, foreign)
