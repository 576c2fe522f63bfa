"""Findings besides: late launches, clocks, several causes at once, and what holds of all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis.strategies import any_traces, healthy_jobs, jobs
from tests.diagnosis.truth import JOB, check_findings, found_in, only_finding, planted_ms, standing
from tests.exhaustive import examples
from tests.synthetic import Connections, Extra, SyntheticJob, synthetic_trace, with_ranks

from headway.diagnosis import diagnose
from headway.diagnosis.findings import Finding, listed, milliseconds, supersede
from headway.diagnosis.stragglers import UNKNOWN
from headway.model import ModelSpec
from headway.trace.events import Kind
from headway.trace.format import ClockFit, Trace

LARGE = replace(JOB, bucket_bytes=(4_000_000,) * 4)
STALL = Extra(1, "rest", 60.0, range(2, 30, 5))


@settings(max_examples=examples(60), deadline=None)
@given(healthy_jobs)
def test_nothing_stands_out_of_a_healthy_job(job: SyntheticJob) -> None:
    found = found_in(job)
    assert standing(found) == []
    assert found.verdict.startswith("Nothing stands out: ")


@settings(max_examples=examples(100), deadline=None)
@given(any_traces())
def test_findings_of_any_trace_make_sense(trace: Trace) -> None:
    check_findings(trace, diagnose(trace))


@settings(max_examples=examples(40), deadline=None)
@given(jobs)
def test_findings_of_any_job_make_sense(job: SyntheticJob) -> None:
    trace = synthetic_trace(job)
    check_findings(trace, diagnose(trace))


# Gradients reduced by hand


@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_that_are_reduced_when_backward_is_over(world_size: int, buckets: int) -> None:
    job = replace(LARGE, world_size=world_size, by_hand=True, bucket_bytes=(16_000_000 // buckets,) * buckets)
    finding = only_finding(found_in(job), "late_launch")
    assert finding.sentence.startswith("Gradients are launched late: 16.0 MB in ")
    assert ("one collective" in finding.sentence) == (buckets == 1)
    if buckets > 1:
        assert "ms after they were ready, which costs" in finding.sentence
        assert finding.cost_ms == pytest.approx(planted_ms(job, by_hand=False), rel=0.35)


def test_they_are_found_where_nobody_noted_when_they_were_ready() -> None:
    trace = synthetic_trace(replace(LARGE, by_hand=True))
    events = {rank: rows.where(rows.kind != Kind.GRADIENT_READY) for rank, rows in trace.events.items()}
    finding = only_finding(diagnose(replace(trace, events=events)), "late_launch")
    assert "start only when backward is over, which costs" in finding.sentence


def test_without_a_model_nobody_knows_what_the_gradients_are() -> None:
    trace = synthetic_trace(replace(LARGE, by_hand=True))
    found = diagnose(replace(trace, model=ModelSpec(parameters=())))
    assert standing(found) == ["communication"]
    assert "the program blocks on" in found.verdict


def test_what_is_reduced_after_backward_may_be_too_little_for_gradients() -> None:
    trace = synthetic_trace(replace(LARGE, by_hand=True))
    larger = tuple(one.model_copy(update={"shape": (3 * one.shape[0],)}) for one in trace.model.parameters)
    model = trace.model.model_copy(update={"parameters": larger})
    assert standing(diagnose(replace(trace, model=model))) == ["communication"]


def test_gradients_that_overlap_and_small_ones_by_hand_are_not_late() -> None:
    for job in (
        LARGE,
        replace(JOB, by_hand=True, bucket_bytes=(1000,) * 4),
        replace(JOB, blocking_loss=True),
    ):
        assert "late_launch" not in standing(found_in(job))


# Clocks


def skewed(offsets_ms: dict[int, float], job: SyntheticJob = JOB, *, by: str = "causality") -> Trace:
    """The job on clocks that had been off and were set right."""
    fits = {
        rank: ClockFit(offset_ns=ms * 1e6, uncertainty_ns=50_000, by=by)  # type: ignore[arg-type]
        for rank, ms in offsets_ms.items()
    }
    return with_ranks(synthetic_trace(job), {rank: {"clock": fit} for rank, fit in fits.items()})


@pytest.mark.parametrize(
    ("offset_ms", "says"),
    [
        (-40.0, "makes it look late: it is 40 ms ahead"),
        (25.0, "makes all other ranks look late: it is 25 ms behind"),
    ],
)
def test_a_clock_that_would_have_misled_is_told_first(offset_ms: float, says: str) -> None:
    found = diagnose(skewed({1: 0.1, 2: offset_ms, 3: -0.1}))
    assert found.verdict.startswith(f"The clock of rank 2, not slowness, {says} (± 0.05 ms)")
    assert "Nothing stands out" in found.verdict
    (finding,) = [one for one in found.findings if one.cause == "clock_skew"]
    assert (finding.ranks, finding.cost_ms, finding.stands_out) == ((2,), 0.0, False)


def test_the_first_ranks_clock_is_told_by_the_others() -> None:
    found = diagnose(skewed({1: 40.0, 2: 40.1, 3: 40.0}))
    assert found.verdict.startswith(
        "The clock of rank 0, not slowness, makes it look late: it is 40 ms ahead"
    )


def test_with_two_ranks_the_second_ones_clock_is_named() -> None:
    for offset_ms in (40.0, -40.0):
        verdict = diagnose(skewed({1: offset_ms}, replace(JOB, world_size=2))).verdict
        assert "clock of rank 1" in verdict


@pytest.mark.parametrize(
    "trace",
    [
        skewed({2: -40.0}, by="round trips"),  # was never in doubt
        skewed({2: -0.5}),  # too little to mislead
        skewed({1: 9e5, 2: -3e8, 3: 1e11}),  # clocks that count from different moments
    ],
)
def test_other_clocks_are_not_worth_a_word(trace: Trace) -> None:
    found = diagnose(trace)
    assert found.verdict.startswith("Nothing stands out")
    assert "clock_skew" not in [one.cause for one in found.findings]


def test_a_slow_rank_whose_clock_is_off_as_well_is_called_both() -> None:
    found = diagnose(skewed({2: -40.0}, replace(JOB, slow={(2, "forward"): 15.0})))
    assert found.verdict.startswith("The clock of rank 2 also makes it look late")
    assert "not slowness" not in found.verdict
    assert "Rank 2 is a straggler" in found.verdict


# Several causes


@pytest.mark.parametrize(
    ("job", "causes"),
    [
        (replace(JOB, slow={(3, "forward"): 25.0}, extras=(STALL,)), ["straggler", "stalls"]),
        (replace(JOB, slow={(3, "forward"): 6.0}, extras=(STALL,)), ["stalls", "straggler"]),
        (replace(JOB, slow={(1, "forward"): 25.0}, extras=(STALL,)), ["straggler", "stalls"]),
        (replace(JOB, input_ms=30.0, extras=(STALL,)), ["input", "stalls"]),
        (replace(LARGE, connections=Connections({(0, 1): 2.0}), extras=(STALL,)), ["slow_link", "stalls"]),
        (
            replace(JOB, connections=Connections({(0, 1): 2.0}), slow={(2, "optimizer"): 40.0}),
            ["straggler", "slow_link"],
        ),
        (replace(LARGE, by_hand=True, slow={(3, "backward"): 60.0}), ["straggler", "late_launch"]),
    ],
)
def test_of_two_the_costlier_is_told_first_and_both_are_found(job: SyntheticJob, causes: list[str]) -> None:
    found = found_in(job)
    assert [cause for cause in standing(found) if cause in causes] == causes
    assert found.verdict.startswith(found.findings[0].sentence.removesuffix("."))
    if causes[1] == "straggler":
        assert "; in addition, the other ranks wait for rank 3 for " in found.verdict
    check_findings(synthetic_trace(job), found)


# Properties


@settings(max_examples=examples(25), deadline=None)
@given(jobs, st.sampled_from([3, 10, 1000]))
def test_a_slower_clock_scales_costs_and_changes_no_cause(job: SyntheticJob, factor: int) -> None:
    trace = synthetic_trace(replace(job, forward_ms=job.forward_ms + 50))  # no threshold in ms is near
    scaled = {
        rank: replace(
            rows,
            start_ns=rows.start_ns * factor,
            duration_ns=rows.duration_ns * factor,
            enqueue_ns=np.where(rows.enqueue_ns >= 0, rows.enqueue_ns * factor, -1),
        )
        for rank, rows in trace.events.items()
    }
    found, slower = diagnose(trace), diagnose(replace(trace, events=scaled))
    assert standing(found) == standing(slower)
    of_slower = {one.cause: one for one in slower.findings}
    assert set(of_slower) == {one.cause for one in found.findings}
    for one in found.findings:
        assert of_slower[one.cause].ranks == one.ranks
        assert of_slower[one.cause].cost_ms == pytest.approx(factor * one.cost_ms, rel=1e-3, abs=1e-3)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.permutations(range(4)),
    st.sampled_from(
        [
            replace(JOB, slow={(2, "backward"): 15.0}),
            replace(JOB, extras=(STALL,)),
            replace(LARGE, connections=Connections({(1, 2): 1.0})),
            replace(LARGE, connections=Connections({(3, 0): 1.0}, steps=range(0, 30, 4))),
            replace(JOB, jitter=1.5),
        ]
    ),
)
def test_other_numbers_for_ranks_are_blamed_alike(numbers: list[int], job: SyntheticJob) -> None:
    trace = synthetic_trace(job)
    events = {}
    for rank, rows in trace.events.items():
        known = (rows.peer >= 0) & (rows.peer < 4)
        peer = np.where(known, np.array(numbers)[np.where(known, rows.peer, 0)], rows.peer)
        events[numbers[rank]] = replace(rows, peer=peer)
    hosts = {numbers[info.rank]: {"host": info.host} for info in trace.manifest.ranks}
    found, renamed = diagnose(trace), diagnose(with_ranks(replace(trace, events=events), hosts))
    assert standing(found) == standing(renamed)
    for one, other in zip(found.findings, renamed.findings, strict=True):
        assert tuple(numbers[rank] for rank in one.ranks) == other.ranks
        assert other.cost_ms == pytest.approx(one.cost_ms)


def test_names_from_the_trace_break_no_line() -> None:
    trace = synthetic_trace(replace(LARGE, connections=Connections({(0, 1): 1.0})))
    found = diagnose(with_ranks(trace, {0: {"host": "a\n\x1b[31mb\u202e" + "x" * 10_000}}))
    assert found.verdict.startswith("The link from a [31mb xxx")
    assert len(found.verdict) <= 1000
    check_findings(trace, found)


def test_a_finer_finding_takes_the_place_of_what_it_explains() -> None:
    coarse, other = Finding("communication", 10.0, "Coarse."), Finding("input", 1.0, "Other.")
    finer = Finding("slow_link", 6.0, "Finer.")
    assert supersede([coarse, other], finer, "communication") == [other, finer]
    small = replace(finer, cost_ms=4.0)
    assert supersede([coarse, other], small, "communication") == [coarse, other, small]
    assert supersede([coarse, other], small, "communication", explains_ms=5.0) == [other, small]
    hidden = replace(finer, stands_out=False)
    assert supersede([coarse, other], hidden, "communication") == [coarse, other, hidden]


def test_words() -> None:
    assert [milliseconds(ms) for ms in (0, 0.1234, 12.34, 99.5, 1234.5)] == [
        "0 ms", "0.123 ms", "12.3 ms", "100 ms", "1234 ms",
    ]  # fmt: skip
    assert [listed(ranks) for ranks in ((1,), (1, 2), (1, 2, 3, 4))] == [
        "rank 1", "ranks 1, 2", "ranks 1, 2, 3 and more",
    ]  # fmt: skip


COMPUTED = (Kind.FORWARD, Kind.FORWARD_PASS, Kind.BACKWARD, Kind.BACKWARD_PASS, Kind.OPTIMIZER, Kind.INPUT)


def only(trace: Trace, *kinds: str) -> Trace:
    """The same trace without what is of ``kinds``."""
    events = {rank: own.where(~np.isin(own.kind, kinds)) for rank, own in trace.events.items()}
    return replace(trace, events=events)


@pytest.mark.parametrize("slow", [{}, {(2, "backward"): 15.0}])
def test_what_was_not_recorded_is_not_blamed(slow: dict[tuple[int, str], float]) -> None:
    found = diagnose(only(synthetic_trace(replace(JOB, slow=slow)), *COMPUTED))
    assert "rest" not in standing(found)
    assert "outside of" not in found.verdict
    if not slow and not standing(found):
        assert found.verdict.startswith("Nothing stands out in what was recorded. Computation was not")


def test_a_lone_rank_is_told_what_cannot_be_known() -> None:
    trace = synthetic_trace(JOB)
    manifest = trace.manifest.model_copy(update={"ranks": trace.manifest.ranks[:1]})
    alone = replace(trace, manifest=manifest, events={0: trace.events[0]})
    assert any("ranks that are missing from this trace" in note for note in diagnose(alone).notes)
    assert not any("ranks that are missing" in note for note in diagnose(trace).notes)


def test_who_cannot_be_planned_for_is_told_what_to_record() -> None:
    slow = replace(JOB, bucket_bytes=(1_000_000, 33_000_000))
    trace = synthetic_trace(slow)
    bare = replace(trace, model=trace.model.model_copy(update={"parameters": ()}))
    assert "(headway optimize)" in diagnose(trace).verdict
    assert "(headway optimize needs a trace from headway record)" in diagnose(bare).verdict


# Words and weight


@settings(max_examples=examples(30), deadline=None)
@given(any_traces())
def test_there_is_one_bottleneck_at_most_and_what_does_not_stand_out_asks_for_nothing(trace: Trace) -> None:
    found = diagnose(trace)
    told = [one for one in found.findings if "bottleneck" in one.sentence]
    assert len(told) <= 1
    assert all(one is found.findings[0] and one.stands_out for one in told)


def test_what_does_not_stand_out_is_said_in_so_many_words() -> None:
    found = diagnose(synthetic_trace(replace(JOB, input_ms=1.0)))
    (input_,) = [one for one in found.findings if one.cause == "input"]
    assert not input_.stands_out
    assert input_.sentence.startswith("Input: ")
    assert input_.sentence.endswith(" step waits for the data loader.")


def test_no_rank_is_blamed_for_a_part_in_which_it_is_not_slower() -> None:
    """Rank 0 is late in three steps for their optimizer, and faster in it in all others."""
    for seed in range(3):
        job = replace(JOB, world_size=2, steps=20, seed=seed, optimizer_ms=6.0, slow={(1, "optimizer"): 4.0})
        late = tuple(Extra(0, "optimizer", 16.0, (step,)) for step in (3, 8, 14))
        blamed = {one.rank: one for one in diagnose(synthetic_trace(replace(job, extras=late))).stragglers}
        assert blamed[0].cause == UNKNOWN
        assert blamed[1].own_ms > blamed[1].others_ms


def test_noise_above_five_percent_is_told_as_noise() -> None:
    job = replace(JOB, world_size=2, steps=5, slow={(1, "forward"): 3.0})
    found = diagnose(synthetic_trace(job))
    if not standing(found):
        assert found.verdict.startswith("Nothing stands out: ")
        assert (
            "for rank 1, which is within noise: over this many steps, equal ranks may differ by"
            in found.verdict
        )


def searching(trace: Trace) -> Trace:
    return replace(trace, model=trace.model.model_copy(update={"find_unused_parameters": True}))


def test_a_needless_search_for_unused_parameters_is_told() -> None:
    trace = searching(synthetic_trace(JOB))
    found = diagnose(trace)
    (finding,) = [one for one in found.findings if one.cause == "needless_find_unused"]
    assert (
        f"in the {JOB.steps} recorded steps all {len(trace.model.parameters)} parameters" in finding.sentence
    )
    assert finding.sentence in found.verdict
    rank = max(trace.events)
    events = trace.events[rank]
    ready = np.flatnonzero(events.kind == Kind.GRADIENT_READY)
    keep = np.ones(len(events), dtype=bool)
    keep[ready[-1]] = False  # one parameter, in one step of one rank
    partly = replace(trace, events={**trace.events, rank: events.where(keep)})
    for other in (partly, synthetic_trace(JOB)):
        assert "needless_find_unused" not in [one.cause for one in diagnose(other).findings]
