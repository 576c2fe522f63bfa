from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.cluster import AlgorithmCost, Cluster, Host
from headway.diagnosis.diagnosis import diagnose
from headway.errors import TraceError, UserError
from headway.graph.computation import Computation, Item, Part, Point, Timeline
from headway.job import Job
from headway.replayer.as_trace import replayed_trace
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import simulate
from headway.simulator.what_if import WhatIf
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.trace.events import Event, Events, Kind
from headway.trace.format import Trace

MIB = 2**20
# A quarter of a MiB a bucket, as the synthetic job's four parameters are bucketed one by one.
ONE_BY_ONE = DecoupledStrategy(bucket_cap_bytes=1)


def job(**changes: object) -> SyntheticJob:
    settings_of_job = {"world_size": 2, "steps": 5, "gbps": 1.0, "latency_ms": 0.02} | changes
    return SyntheticJob(**settings_of_job)  # type: ignore[arg-type]


def cluster_of(one: SyntheticJob) -> Cluster:
    """The links the synthetic job was made with: its latency is paid once a collective."""
    hosts = tuple(
        Host(name=f"host{rank}", workers=1, up_gbps=one.gbps, down_gbps=one.gbps)
        for rank in range(one.world_size)
    )
    return Cluster(
        hosts=hosts, latency_us=0,
        algorithms={"gloo_all_reduce": AlgorithmCost(overhead_us=one.latency_ms * 1e3)},
    )  # fmt: skip


def as_bucketed(trace: Trace) -> Trace:
    """The synthetic trace with the strategy named that makes its buckets: one parameter each."""
    ranks = tuple(
        info.model_copy(update={"strategy": {"ddp": {"bucket_cap_mb": 0.01}}})
        for info in trace.manifest.ranks
    )
    return Trace(trace.path, trace.manifest.model_copy(update={"ranks": ranks}), trace.model, trace.events)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("gbps", [0.3, 1.0, 20.0])
def test_the_recorded_step_is_reproduced(world_size: int, gbps: float) -> None:
    one = job(world_size=world_size, gbps=gbps)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    # Synthetic collectives run one after the other; Gloo, as replayed, works on two at a time.
    assert replayer.replay().step_ms == pytest.approx(replayer.recorded_step_ms, rel=0.02)


@settings(max_examples=examples(20), deadline=None)
@given(
    forward_ms=st.floats(1, 30), backward_ms=st.floats(1, 60), gbps=st.floats(0.2, 20), jitter=st.floats(0, 0.1),
    slow_ms=st.floats(0, 20),
)  # fmt: skip
def test_the_recorded_step_is_reproduced_whatever_it_was(
    forward_ms: float, backward_ms: float, gbps: float, jitter: float, slow_ms: float
) -> None:
    one = job(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        gbps=gbps,
        jitter=jitter,
        slow={(1, "backward"): slow_ms},
    )
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    assert replayer.replay().step_ms == pytest.approx(replayer.recorded_step_ms, rel=0.03)


def test_links_fitted_from_the_trace_reproduce_it_too() -> None:
    one = job(gbps=0.7, bucket_bytes=(500_000, 1_000_000, 2_000_000, 4_000_000))
    replayer = Replayer(as_bucketed(synthetic_trace(one)))
    assert replayer.cluster.hosts[0].up_gbps == pytest.approx(one.gbps, rel=0.05)
    assert replayer.replay().step_ms == pytest.approx(replayer.recorded_step_ms, rel=0.03)


def test_more_bandwidth_never_hurts_and_less_compute_time_neither() -> None:
    replayer = Replayer(as_bucketed(synthetic_trace(job())))
    times = [replayer.replay(what_if=WhatIf(bandwidth=factor)).step_ms for factor in (0.5, 1, 2, 1000)]
    assert times == sorted(times, reverse=True)
    assert replayer.replay(what_if=WhatIf(compute=0.5)).step_ms < replayer.replay().step_ms


def test_an_endless_link_leaves_computation_alone() -> None:
    one = job()
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    step_ms = replayer.replay(what_if=WhatIf(bandwidth=1e6)).step_ms
    alone_ms = one.input_ms + one.forward_ms + one.backward_ms + one.optimizer_ms + one.rest_ms
    assert step_ms == pytest.approx(alone_ms + one.latency_ms, rel=0.03)


def test_a_job_on_one_host_queues_for_its_memory_and_feels_a_change_of_bandwidth() -> None:
    one = job(world_size=4, ranks_a_host=4, gbps=0.3, latency_ms=0.0)
    replayer = Replayer(as_bucketed(synthetic_trace(one)))
    assert replayer.cluster.local_gbps == pytest.approx(one.gbps, rel=0.05)
    recorded_ms = replayer.recorded_step_ms
    assert replayer.replay().step_ms == pytest.approx(recorded_ms, rel=0.02)
    assert replayer.replay(what_if=WhatIf(bandwidth=4.0)).step_ms < 0.8 * recorded_ms


def test_more_workers_are_played_with_the_recorded_ones_in_turn() -> None:
    replayer = Replayer(as_bucketed(synthetic_trace(job())))
    result = replayer.replay(what_if=WhatIf(workers=8))
    assert result.graph.world_size == 8
    # A ring of 8 moves 7/4 of what a ring of 2 does.
    assert result.step_ms > replayer.replay().step_ms


def test_decoupling_hides_communication_under_the_next_forward() -> None:
    one = job(forward_ms=40, backward_ms=40, gbps=1.0, bucket_bytes=(1_250_000,) * 4)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    ddp = replayer.replay(DistributedDataParallelStrategy(bucket_cap_mb=0.01)).step_ms
    spelled_out = ONE_BY_ONE.spelled_out(Job.of(replayer.trace.model))
    decoupled = replayer.replay(spelled_out.model_copy(update={"channels": 1})).step_ms
    compute_ms = one.input_ms + one.forward_ms + one.backward_ms + one.optimizer_ms + one.rest_ms
    assert compute_ms < decoupled < ddp
    # Two gathers that share the link both come later than the one that forward needs first would alone.
    assert decoupled < replayer.replay(spelled_out).step_ms


def test_a_replay_reads_as_a_trace_whose_breakdown_adds_up() -> None:
    replayer = Replayer(as_bucketed(synthetic_trace(job(gbps=20.0, slow={(1, "forward"): 8.0}))))
    for strategy in (None, ONE_BY_ONE.spelled_out(Job.of(replayer.trace.model))):
        result = replayer.replay(strategy)
        diagnosis = diagnose(replayed_trace(replayer, result))
        assert diagnosis.step_ms == pytest.approx(result.step_ms, rel=1e-6)
        for parts in diagnosis.to_document()["breakdown_ms"].values():
            assert sum(parts.values()) == pytest.approx(result.step_ms, rel=0.2)
    assert diagnose(replayed_trace(replayer, replayer.replay())).stragglers[0].rank == 1


def test_what_cannot_be_answered_is_refused() -> None:
    trace = synthetic_trace(job())
    with pytest.raises(UserError, match="another world size"):
        Replayer(trace, cluster_of(job(world_size=4)))
    with pytest.raises(TraceError, match="which strategy"):
        Replayer(trace, cluster_of(job())).replay()
    with pytest.raises(UserError, match="too large"):
        Replayer(as_bucketed(trace), cluster_of(job())).replay(what_if=WhatIf(workers=4095))


def test_replaying_twice_gives_the_same_to_the_nanosecond() -> None:
    trace = as_bucketed(synthetic_trace(job(jitter=0.1)))
    first, second = (Replayer(trace).replay().played.end_ns for _ in range(2))
    assert np.array_equal(first, second)


def test_what_was_replayed_before_changes_no_answer() -> None:
    """Graphs on the same links share what was laid out and the numbers of routes: the order of replays is no matter."""
    trace = as_bucketed(synthetic_trace(job(jitter=0.1, world_size=3)))
    plans = (None, ONE_BY_ONE, ONE_BY_ONE.model_copy(update={"channels": 2}),
             DistributedDataParallelStrategy(bucket_cap_mb=0.5))  # fmt: skip
    what_ifs = (WhatIf(), WhatIf.parse(["bandwidth:host1=0.5x"]))
    alone = {(i, j): Replayer(trace).replay(plans[i], what_ifs[j]) for i in range(len(plans)) for j in (0, 1)}
    replayer = Replayer(trace)
    for i, j in [*alone, *reversed(alone)]:
        assert np.array_equal(replayer.replay(plans[i], what_ifs[j]).played.end_ns, alone[i, j].played.end_ns)


def altered(trace: Trace, change: Callable[[Event], Event | None]) -> Trace:
    """The trace with every collective of gradients changed, or dropped where ``change`` says None."""
    events = {
        rank: Events.from_rows(
            [
                kept
                for row in own
                if (kept := change(row) if row.kind == Kind.COLLECTIVE and row.bucket >= 0 else row)
            ]
        )
        for rank, own in trace.events.items()
    }
    return Trace(trace.path, trace.manifest, trace.model, events)


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row._replace(size_bytes=row.size_bytes // 2),  # a hook that halves every gradient
        lambda row: (
            None if row.bucket == 3 else row
        ),  # a bucket that the strategy launches and the job did not
        lambda row: None,
    ],
)
def test_a_recording_that_communicated_something_else_is_refused(
    change: Callable[[Event], Event | None],
) -> None:
    trace = altered(as_bucketed(synthetic_trace(job())), change)
    with pytest.raises(TraceError, match="cannot reproduce this recording"):
        Replayer(trace, cluster_of(job())).replay()


def test_a_gradient_that_never_becomes_ready_is_noticed() -> None:
    trace = as_bucketed(synthetic_trace(job()))
    events = {
        rank: Events.from_rows(
            [row for row in own if (row.kind, row.name) != ("gradient_ready", "stem.weight")]
        )
        for rank, own in trace.events.items()
    }
    with pytest.raises(TraceError, match="cannot reproduce this recording"):
        Replayer(Trace(trace.path, trace.manifest, trace.model, events), cluster_of(job())).replay()


def test_one_step_that_differs_is_tolerated() -> None:
    trace = altered(as_bucketed(synthetic_trace(job())), lambda row: None if row.step == 0 else row)
    Replayer(trace, cluster_of(job())).replay()


def test_a_strategy_the_trace_names_wrongly_is_one_line() -> None:
    trace = synthetic_trace(job())
    ranks = tuple(
        info.model_copy(update={"strategy": {"ddp": {"bucket_cap_mb": -1}}}) for info in trace.manifest.ranks
    )
    manifest = trace.manifest.model_copy(update={"ranks": ranks})
    with pytest.raises(TraceError, match="bucket_cap_mb") as caught:
        Replayer(Trace(trace.path, manifest, trace.model, trace.events), cluster_of(job())).replay()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("point", [Point.BLOCKING, Point.BACKWARD_END])
def test_everything_that_is_launched_counts_to_the_size(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayer = Replayer(as_bucketed(synthetic_trace(job())), cluster_of(job()))
    monkeypatch.setattr("headway.simulator.simulate.MAX_OPERATIONS", 5000)
    replayer.replay()
    first, *others = replayer.job.steps.timelines[0]
    more = Timeline(0, first.step, (*first.items, *[Item(point, "all_reduce", 0, 4)] * 200))
    timelines = {**replayer.job.steps.timelines, 0: (more, *others)}
    larger = replace(replayer.job, computation=Computation(timelines))
    with pytest.raises(UserError, match="too large"):
        simulate(larger, replayer.recorded_strategy)


def test_a_slow_rank_and_a_slow_link_hold_everybody_up() -> None:
    one = job(world_size=4)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    usual = replayer.replay()
    slow = replayer.replay(what_if=WhatIf(rank_factors={2: 2.0}))
    assert diagnose(replayed_trace(replayer, slow)).stragglers[0].rank == 2
    assert slow.step_ms > 1.2 * usual.step_ms
    both = [
        replayer.replay(what_if=WhatIf.parse([f"bandwidth:host1:{way}=0.1x"])).step_ms
        for way in ("up", "down")
    ]
    assert min(both) > 1.3 * usual.step_ms
    assert both[0] == pytest.approx(both[1], rel=0.01)  # a ring uses every link in either direction alike
    with pytest.raises(UserError, match="unknown rank"):
        replayer.replay(what_if=WhatIf.parse(["compute:4=2x"]))


def test_more_workers_draw_other_steps_and_wait_longer_for_the_slowest() -> None:
    """Two ranks take 0 to 80 ms more in backward, evenly drawn: of eight the slowest takes more than of two."""
    trace = as_bucketed(synthetic_trace(job(world_size=2, steps=20, gbps=100.0)))
    rows = {}
    generator = np.random.default_rng(5)
    extra_ns = generator.permutation(np.linspace(0, 80e6, 40)).round().astype(int).reshape(2, 20)
    replayer = Replayer(trace, cluster_of(job(gbps=100.0)))
    for rank, timelines in replayer.job.steps.timelines.items():
        rows[rank] = tuple(
            Timeline(rank, timeline.step, _longer(timeline.items, int(extra)))
            for timeline, extra in zip(timelines, extra_ns[rank], strict=True)
        )
    replayer.job = replace(replayer.job, computation=Computation(rows))
    alike_ms = float(np.mean(extra_ns.max(axis=0))) / 1e6
    two_ms = replayer.replay().step_ms
    eight_ms = replayer.replay(what_if=WhatIf(workers=8)).step_ms
    drawn = np.concatenate([np.roll(extra_ns, -shift, axis=1) for shift in range(4)])
    expected_ms = float(np.mean(drawn.max(axis=0))) / 1e6
    assert expected_ms > alike_ms + 8
    assert eight_ms - two_ms == pytest.approx(expected_ms - alike_ms, abs=1.5)
    assert eight_ms == pytest.approx(replayer.replay(what_if=WhatIf(workers=8), fold=False).step_ms)


def _longer(items: tuple[Item, ...], extra_ns: int) -> tuple[Item, ...]:
    """The first stretch of backward takes so much longer."""
    place = next(
        number for number, item in enumerate(items) if item.kind == Part.BACKWARD and item.duration_ns
    )
    longer = items[place]._replace(duration_ns=items[place].duration_ns + extra_ns)
    return (*items[:place], longer, *items[place + 1 :])


def test_an_answer_has_an_uncertainty() -> None:
    one = job()
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    base = replayer.base
    assert 0 <= base.waiting_ms < base.step_ms
    missed_ms = abs(base.step_ms - replayer.recorded_step_ms)
    assert replayer.expect(base).uncertainty_ms >= missed_ms * 0.99
    costs = {"gloo_all_reduce": AlgorithmCost(overhead_us=20, fit_error=0.5)}
    vague = Replayer(
        as_bucketed(synthetic_trace(one)), cluster_of(one).model_copy(update={"algorithms": costs})
    )
    assert vague.expect(vague.base).uncertainty_ms >= 0.5 * vague.base.waiting_ms > 0


def test_quicker_modules_by_pattern() -> None:
    one = job(world_size=1, gbps=20.0)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    base_ms, events = replayer.base.step_ms, replayer.trace.events[0]
    names = {row.name for row in events.of_kind(Kind.FORWARD)}
    name = sorted(names)[0]
    spent_ms = sum(
        row.duration_ns for row in events.of_kind(Kind.FORWARD, Kind.BACKWARD) if row.name == name
    ) / 1e6 / len(replayer.trace.steps)  # fmt: skip
    half = replayer.replay(what_if=WhatIf.parse([f"kernels:{name}=0.5x"]))
    assert base_ms - half.step_ms == pytest.approx(spent_ms / 2, rel=0.01)
    everything = replayer.replay(what_if=WhatIf.parse(["kernels:*=0.5x", "kernels:*=2x"]))
    assert everything.step_ms == pytest.approx(base_ms)
    with pytest.raises(TraceError, match="module; got 'nothing'"):
        replayer.replay(what_if=WhatIf.parse(["kernels:nothing=0.5x"]))
