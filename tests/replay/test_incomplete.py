"""Traces that lack parameters or ranks are replayed as far as that goes, and say how far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.replay.test_replayer import altered, as_bucketed, cluster_of, job
from tests.synthetic import MS, synthetic_trace

from headway.errors import TraceError
from headway.model import ModelSpec
from headway.replay.incomplete import of_recorded_buckets
from headway.replay.replayer import Replayer
from headway.replay.what_if import WhatIf
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.trace.events import Event, Events, Kind, Stream
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


def without(trace: Trace, *ranks: int) -> Trace:
    infos = tuple(info for info in trace.manifest.ranks if info.rank not in ranks)
    events = {rank: own for rank, own in trace.events.items() if rank not in ranks}
    return replace(trace, manifest=trace.manifest.model_copy(update={"ranks": infos}), events=events)


@pytest.mark.parametrize("gbps", [0.3, 20.0])
def test_recorded_buckets_answer_as_parameters_do(gbps: float) -> None:
    one = job(gbps=gbps, jitter=0.05)
    whole = as_bucketed(synthetic_trace(one))
    known, unknown = (Replayer(trace, cluster_of(one)) for trace in (whole, bare(whole)))
    assert known.lacks == ()
    assert "names no parameters" in unknown.lacks[0]
    assert len(unknown.lacks) == 1
    assert unknown.base.step_ms == pytest.approx(unknown.recorded_step_ms, rel=0.02)
    for asked in WHAT_IFS:
        what_if = WhatIf.parse([asked])
        expected = known.replay(what_if=what_if).step_ms
        assert unknown.replay(what_if=what_if).step_ms == pytest.approx(expected, rel=0.01), asked
    assert unknown.base.peak_bytes is None


def test_no_plan_is_laid_over_recorded_buckets() -> None:
    replayer = Replayer(bare(synthetic_trace(job())))
    with pytest.raises(TraceError, match=r"no plan can be laid over it\. Record the job with headway record"):
        replayer.replay(DistributedDataParallelStrategy())


def test_links_are_fitted_from_recorded_buckets() -> None:
    one = job(gbps=0.5)
    assert Replayer(bare(synthetic_trace(one))).cluster.hosts[0].up_gbps == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("missing", [(0,), (1, 3), (1, 2, 3)])
def test_ranks_that_were_not_recorded_do_as_the_others(missing: tuple[int, ...]) -> None:
    one = job(world_size=4)
    whole = as_bucketed(synthetic_trace(one))
    replayer = Replayer(without(whole, *missing), cluster_of(one))
    assert replayer.lacks[0].startswith(f"Only {4 - len(missing)} of 4 ranks were recorded")
    assert replayer.base.step_ms == pytest.approx(Replayer(whole, cluster_of(one)).base.step_ms, rel=0.01)
    assert replayer.base.graph.world_size == 4


def test_links_are_fitted_with_ranks_missing() -> None:
    cluster = Replayer(without(as_bucketed(synthetic_trace(job(world_size=4, gbps=0.5))), 0, 2)).cluster
    assert cluster.world_size == 4
    assert [host.name for host in cluster.hosts] == ["unrecorded-0", "host1", "unrecorded-2", "host3"]
    assert cluster.hosts[0].up_gbps == pytest.approx(0.5, rel=0.1)


def test_steps_with_other_buckets_are_left_out() -> None:
    one = job()

    def without_one(row: Event) -> Event | None:
        return None if (row.kind, row.step, row.bucket) == (Kind.COLLECTIVE, first, 0) else row

    trace = bare(synthetic_trace(one))
    first, *others = trace.steps
    assert of_recorded_buckets(changed(trace, without_one)).steps == tuple(others)


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


def test_a_collective_that_is_no_gradients_is_waited_for_where_computation_stood_still() -> None:
    one = job()
    trace = bare(synthetic_trace(one))
    more: dict[int, list[Event]] = {}
    for rank, own in trace.events.items():
        more[rank] = list(own)
        for window in own.of_kind(Kind.STEP):
            start_ns = window.end_ns - MS
            more[rank] += [
                Event(Kind.COLLECTIVE, "all_reduce", Stream.COMMUNICATION, window.step, start_ns, MS, start_ns, "g",
                      10_000 + window.step, 125_000),
                Event(Kind.WAIT, "communication", Stream.COMPUTE, window.step, start_ns, MS),
            ]  # fmt: skip
    graph = Replayer(replace(trace, events={r: Events.from_rows(rows) for r, rows in more.items()}),
                     cluster_of(one)).base.graph  # fmt: skip
    others = [each for each in graph.collectives if each.bucket < 0]
    assert len(others) == len(trace.steps) + 1  # the first step is played twice
    assert {each.size_bytes for each in others} == {125_000}


def test_what_cannot_be_replayed_is_refused() -> None:
    trace = bare(synthetic_trace(job()))
    unsized = altered(trace, lambda row: row._replace(size_bytes=-1))
    with pytest.raises(TraceError, match=r"does not say how many bytes .*record_shapes=True"):
        Replayer(unsized)
    with pytest.raises(TraceError, match="holds no collective of gradients"):
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
