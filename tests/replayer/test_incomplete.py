"""Traces that lack parameters or ranks are replayed as far as that goes, and say how far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.replayer.test_replayer import altered, as_bucketed, cluster_of, job
from tests.synthetic import MS, synthetic_trace, without_ranks

from headway.diagnosis.diagnosis import diagnose
from headway.errors import TraceError
from headway.model import ModelSpec
from headway.replayer.as_trace import replayed_trace
from headway.replayer.incomplete import check_takes_plans, of_recorded_buckets
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.events import WORK, Event, Events, Kind, Stream
from headway.trace.format import Trace

WHAT_IFS = ("bandwidth=0.5x", "compute=2x", "workers=5", "compute:1=3x")
OF_OPERATORS = (Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.GRADIENT_READY)


def bare(trace: Trace) -> Trace:
    """As an importer would have it: no parameters, no strategy, no passes, waits for nobody knows what."""

    def imported(row: Event) -> Event | None:
        if row.kind == Kind.WAIT:
            return row._replace(name="communication")
        return None if row.kind in OF_OPERATORS else row

    ranks = tuple(info.model_copy(update={"strategy": {}, "buckets": ()}) for info in trace.manifest.ranks)
    return replace(
        changed(trace, imported),
        manifest=trace.manifest.model_copy(update={"ranks": ranks}),
        model=ModelSpec(parameters=()),
    )


def changed(trace: Trace, change: Callable[[Event], Event | None]) -> Trace:
    events = {
        rank: Events.from_rows([row for row in map(change, own) if row]) for rank, own in trace.events.items()
    }
    return replace(trace, events=events)


def test_no_plan_is_laid_over_a_trace_without_computation() -> None:
    trace = synthetic_trace(job())
    passes = (Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD)
    without = changed(trace, lambda row: None if row.kind in passes else row)
    check_takes_plans(trace)
    with pytest.raises(TraceError, match=r"without computation.*no backward on rank 0"):
        check_takes_plans(without)


def test_no_plan_is_laid_over_waits_that_replay_does_not_lay_out() -> None:
    trace = synthetic_trace(job())
    waits = {
        rank: [row._replace(kind=Kind.WAIT, name=WORK) for row in own.of_kind(Kind.FORWARD_PASS)]
        for rank, own in trace.events.items()
    }
    events = {rank: Events.from_rows([*own, *waits[rank]]) for rank, own in trace.events.items()}
    with pytest.raises(TraceError, match=r"own asynchronous communication.*got such waits take \d+%"):
        check_takes_plans(replace(trace, events=events))


def test_pipelines_are_refused_by_name() -> None:
    trace = synthetic_trace(job())
    staged = changed(
        trace, lambda row: row._replace(stage=row.step % 2) if row.kind == Kind.FORWARD_PASS else row
    )
    for refuse in (Replayer, check_takes_plans):
        with pytest.raises(
            TraceError, match="does not support this pipeline; got passes and messages of 2 stages"
        ):
            refuse(staged)


def test_a_blocking_call_that_returns_late_is_no_wait_of_the_jobs_own() -> None:
    trace = synthetic_trace(job(blocking_loss=True))
    known = {
        rank: [row for row in own.of_kind(Kind.WAIT) if row.name != WORK]
        for rank, own in trace.events.items()
    }
    late = {
        rank: [row._replace(name=WORK, duration_ns=row.duration_ns + 50_000_000) for row in rows]
        for rank, rows in known.items()
    }
    events = {rank: Events.from_rows([*own, *late[rank]]) for rank, own in trace.events.items()}
    check_takes_plans(replace(trace, events=events))


@pytest.mark.parametrize("gbps", [0.3, 20.0])
def test_recorded_buckets_answer_as_parameters_do(gbps: float) -> None:
    one = job(gbps=gbps, jitter=0.05)
    whole = as_bucketed(synthetic_trace(one))
    known, unknown = (Replayer(trace, cluster_of(one)) for trace in (whole, bare(whole)))
    assert known.lacks == ()
    assert "no parameter names" in unknown.lacks[0]
    assert len(unknown.lacks) == 1
    assert unknown.base.step_ms == pytest.approx(unknown.recorded_step_ms, rel=0.02)
    for asked in WHAT_IFS:
        what_if = WhatIf.parse([asked])
        expected = known.replay(what_if=what_if).step_ms
        assert unknown.replay(what_if=what_if).step_ms == pytest.approx(expected, rel=0.01), asked
    assert unknown.base.peak_bytes is None


def test_no_plan_is_laid_over_recorded_buckets() -> None:
    replayer = Replayer(bare(synthetic_trace(job())))
    with pytest.raises(TraceError, match=r"no plan can be applied .* Record a job that constructs"):
        replayer.replay(DistributedDataParallelStrategy())


def test_links_are_fitted_from_recorded_buckets() -> None:
    one = job(gbps=0.5)
    assert Replayer(bare(synthetic_trace(one))).cluster.hosts[0].up_gbps == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("missing", [(0,), (1, 3), (1, 2, 3)])
def test_ranks_that_were_not_recorded_do_as_the_others(missing: tuple[int, ...]) -> None:
    one = job(world_size=4)
    whole = as_bucketed(synthetic_trace(one))
    replayer = Replayer(without_ranks(whole, *missing), cluster_of(one))
    assert replayer.lacks[0].startswith(f"Only {4 - len(missing)} of 4 ranks were recorded")
    assert replayer.base.step_ms == pytest.approx(Replayer(whole, cluster_of(one)).base.step_ms, rel=0.01)
    assert replayer.base.graph.world_size == 4


@pytest.mark.parametrize(
    ("missing", "workers"),
    [((1,), [2, 2]), ((3,), [2, 2]), ((0,), [2, 2]), ((2, 3), [4]), ((0, 2), [3, 1]), ((1, 2), [3, 1])],
)
def test_ranks_that_were_not_recorded_are_where_the_ones_before_them_are(
    missing: tuple[int, ...], workers: list[int]
) -> None:
    one = job(world_size=4, gbps=0.5, ranks_a_host=2)
    cluster = Replayer(without_ranks(as_bucketed(synthetic_trace(one)), *missing)).cluster
    assert [host.workers for host in cluster.hosts] == workers
    assert cluster.hosts[0].up_gbps == pytest.approx(0.5, rel=0.1)


def test_ranks_that_were_recorded_take_their_own_steps() -> None:
    """The slow one stays where it is, whoever is missing."""
    one = job(world_size=4, slow={(3, "forward"): 30.0})
    replayer = Replayer(without_ranks(as_bucketed(synthetic_trace(one)), 0), cluster_of(one))
    said = diagnose(replayed_trace(replayer, replayer.base)).stragglers[0]
    assert said.rank == 3
    assert replayer.base.graph.ranks == 4


def test_steps_with_other_buckets_are_left_out() -> None:
    one = job()

    def without_one(row: Event) -> Event | None:
        return None if (row.kind, row.step, row.bucket) == (Kind.COLLECTIVE, first, 0) else row

    trace = bare(synthetic_trace(one))
    first, *others = trace.steps
    uneven = changed(trace, without_one)
    assert of_recorded_buckets(uneven).steps == tuple(others)
    said = f"Only {len(others)} of {len(trace.steps)} steps have the usual buckets"
    assert any(each.startswith(said) for each in Replayer(uneven).lacks)


def test_a_gradient_is_ready_when_an_importer_says_so() -> None:
    """A device begins a bucket only behind the one before; the importer knows when it was launched."""
    trace = bare(synthetic_trace(job(gbps=0.3)))
    ready = {
        (row.step, row.bucket): row.start_ns
        for row in trace.events[0].of_kind(Kind.COLLECTIVE)
        if row.bucket >= 0
    }

    def late(row: Event) -> Event:
        return row._replace(enqueue_ns=row.start_ns) if row.kind == Kind.COLLECTIVE else row

    rows = [
        Event(Kind.GRADIENT_READY, "", Stream.COMPUTE, step, at_ns - MS, 0, bucket=bucket)
        for (step, bucket), at_ns in ready.items()
    ]
    told = changed(trace, late)
    told = replace(told, events={
        rank: Events.concatenated([own, Events.from_rows(rows)]) for rank, own in told.events.items()
    })  # fmt: skip
    laid = of_recorded_buckets(told).events[0].of_kind(Kind.GRADIENT_READY)
    began = of_recorded_buckets(changed(trace, late)).events[0].of_kind(Kind.GRADIENT_READY)
    assert laid.start_ns.sum() < began.start_ns.sum()
    assert sorted(set(laid.name)) == [f"bucket {index}" for index in range(len(set(laid.name)))]


def with_collectives(trace: Trace, *rows: Event, ranks: tuple[int, ...] = (0, 1)) -> Trace:
    """The same in every step on ``ranks``, at times after the step's end less 10 ms; a wait has no group."""
    events = dict(trace.events)
    for rank in ranks:
        more = [
            row._replace(
                step=window.step, start_ns=at_ns, enqueue_ns=at_ns if row.kind == Kind.COLLECTIVE else -1,
                sequence=10_000 * (row.sequence + 2) + window.step if row.kind == Kind.COLLECTIVE else -1,
            )
            for window in events[rank].of_kind(Kind.STEP)
            for row in rows
            for at_ns in [window.end_ns - 10 * MS + row.start_ns]
        ]  # fmt: skip
        events[rank] = Events.concatenated([events[rank], Events.from_rows(more)])
    return replace(trace, events=events)


def collective(
    start_ms: float, ms: float, *, name: str = "all_reduce", group: str = "", sequence: int = 0
) -> Event:
    return Event(Kind.COLLECTIVE, name, Stream.COMMUNICATION, 0, round(start_ms * MS), round(ms * MS), 0, group,
                 sequence, 125_000)  # fmt: skip


def wait(start_ms: float, ms: float, name: str = "communication") -> Event:
    return Event(Kind.WAIT, name, Stream.COMPUTE, 0, round(start_ms * MS), round(ms * MS))


def blocking(trace: Trace, gbps: float = 20.0) -> tuple[Replayer, list[int]]:
    """The replay, and the sizes of what is waited for besides gradients, in each step but the first."""
    replayer = Replayer(trace, cluster_of(job(gbps=gbps)))
    return replayer, [each.size_bytes for each in replayer.base.graph.collectives if each.bucket < 0]


LATE = 40.0  # ms that the optimizer takes, so that there is room for more in a step


def roomy() -> Trace:
    return bare(synthetic_trace(job(gbps=20.0, optimizer_ms=LATE)))


def test_what_all_ranks_stood_still_for_is_waited_for_again() -> None:
    trace = roomy()
    for name in ("communication", "all_reduce"):  # Chakra names waits after what was waited for
        replayer, sizes = blocking(with_collectives(trace, collective(0, 1), wait(0, 1, name)))
        assert sizes == [125_000] * (len(trace.steps) + 1)  # the first step is played twice
        assert replayer.base.step_ms == pytest.approx(replayer.recorded_step_ms - 0.9, abs=0.3)


def test_two_that_end_together_are_both_waited_for() -> None:
    rows = collective(0, 2), collective(1, 1, sequence=1), wait(1, 1)
    _, sizes = blocking(with_collectives(roomy(), *rows))
    assert len(sizes) == 2 * (len(roomy().steps) + 1)


def test_what_one_wait_was_for_keeps_its_sizes_and_its_order() -> None:
    small, large = collective(0, 2), collective(1, 1, sequence=1)._replace(size_bytes=500_000)
    _, sizes = blocking(with_collectives(roomy(), small, large, wait(1, 1)))
    assert sizes == [125_000, 500_000] * (len(roomy().steps) + 1)


def test_what_nobody_waited_for_is_not_taken_for_what_was_asked_for_at_the_same_moment() -> None:
    trace = roomy()
    manifest = trace.manifest.model_copy(update={"groups": {"tp": (0,)}})
    part = collective(0, 1, group="tp", sequence=1)._replace(size_bytes=-1)
    rows = part, collective(0, 2), wait(0, 2)
    _, sizes = blocking(with_collectives(replace(trace, manifest=manifest), *rows))
    assert sizes == [125_000] * (len(trace.steps) + 1)


@pytest.mark.parametrize("case", ["under computation", "on one rank", "of other ranks", "no collective"])
def test_other_waits_are_time_that_passes(case: str) -> None:
    trace = roomy()
    if case == "under computation":  # and two gaps in it
        trace = with_collectives(trace, collective(0, 8), wait(1, 0.5), wait(6, 0.5))
    elif case == "on one rank":
        trace = with_collectives(with_collectives(trace, collective(0, 2)), wait(0, 2), ranks=(1,))
    elif case == "of other ranks":
        manifest = trace.manifest.model_copy(update={"groups": {"tp": (0,)}})
        trace = with_collectives(replace(trace, manifest=manifest), collective(0, 2, group="tp"), wait(0, 2))
    else:
        trace = with_collectives(trace, wait(0, 3))
    replayer, sizes = blocking(trace)
    assert sizes == []
    assert replayer.base.step_ms == pytest.approx(replayer.recorded_step_ms, rel=0.01)


def test_all_reduces_of_a_part_of_the_ranks_are_no_buckets() -> None:
    trace = roomy()
    manifest = trace.manifest.model_copy(update={"groups": {"tp": (0,)}})
    row = collective(0, 2, group="tp")._replace(bucket=7)
    laid = of_recorded_buckets(with_collectives(replace(trace, manifest=manifest), row))
    assert len(laid.model.parameters) == len(of_recorded_buckets(trace).model.parameters)


def test_backward_ends_before_the_optimizer_whatever_is_waited_for_behind_it() -> None:
    """Nothing is left to wait for at the end of backward; the loss is reduced behind the optimizer."""
    trace = roomy()
    hidden = changed(trace, lambda row: None if row.kind == Kind.WAIT else row)
    laid = of_recorded_buckets(with_collectives(hidden, collective(9, 1), wait(9, 1)))
    for step in laid.steps:
        rows = laid.events[0].of_step(step)
        assert rows.of_kind(Kind.BACKWARD_PASS).end_ns.max() <= rows.of_kind(Kind.OPTIMIZER).start_ns.min()


def test_what_cannot_be_replayed_is_refused() -> None:
    trace = bare(synthetic_trace(job()))
    unsized = altered(trace, lambda row: row._replace(size_bytes=-1))
    with pytest.raises(TraceError, match=r"sizes of collectives are missing .*record_shapes=True"):
        Replayer(unsized)
    with pytest.raises(TraceError, match="has no gradient collectives"):
        Replayer(altered(trace, lambda _: None))
    with pytest.raises(TraceError, match="got a reduce_scatter of gradients"):
        Replayer(altered(trace, lambda row: row._replace(name="reduce_scatter")))
    push = Event(Kind.PUSH, "key", Stream.COMMUNICATION, trace.steps[0], 0, 1)
    served = replace(trace, events={
        rank: Events.concatenated([own, Events.from_rows([push])]) for rank, own in trace.events.items()
    })  # fmt: skip
    with pytest.raises(TraceError, match="other frameworks' parameter servers"):
        Replayer(served)
    own_step = altered(trace, lambda row: row._replace(size_bytes=row.size_bytes + 4 + row.step))
    uneven = replace(trace, events={**trace.events, 1: own_step.events[1]})
    with pytest.raises(TraceError, match="no step has the same buckets on all ranks"):
        Replayer(uneven)
