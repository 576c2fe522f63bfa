"""The diagnosis of traces whose truth is known, and what holds of any trace."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis.strategies import COMPUTE, any_traces, jobs
from tests.exhaustive import examples
from tests.synthetic import MS, SyntheticJob, events_of, synthetic_trace, trace_of

from headway import files
from headway.cluster import Cluster, Host
from headway.diagnosis import Diagnosis, diagnose
from headway.diagnosis.breakdown import PARTS
from headway.errors import ClusterError, TraceError
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Trace


def assert_sums_hold(trace: Trace, found: Diagnosis) -> None:
    for rank, parts in found.breakdown.items():
        rows = {e.step: e.duration_ns for e in trace.events[rank].of_kind(Kind.STEP) if e.step in found.steps}
        assert parts.total_ms == pytest.approx(sum(rows.values()) / len(rows) / MS, abs=1e-9)
        assert all(getattr(parts, part) >= 0 for part in PARTS)
    assert sum(piece.ms for piece in found.critical_path) == pytest.approx(found.typical_step_ms, abs=1e-9)
    path = found.critical_path
    assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(path))
    assert all(piece.end_ns > piece.start_ns for piece in path)
    assert 0 <= found.overlap_percent <= 100
    assert "\n" not in found.verdict
    document = json.loads(files.dump_json(found.to_document()))
    assert document["kind"] == "diagnosis"


@settings(max_examples=examples(150), deadline=None)
@given(any_traces())
def test_parts_and_path_add_up_for_any_trace(trace: Trace) -> None:
    assert_sums_hold(trace, diagnose(trace))


@settings(max_examples=examples(60), deadline=None)
@given(jobs)
def test_parts_and_path_add_up_for_every_job(job: SyntheticJob) -> None:
    trace = synthetic_trace(job)
    found = diagnose(trace)
    assert_sums_hold(trace, found)
    for rank, parts in found.breakdown.items():
        computed = list(trace.events[rank].of_kind(Kind.FORWARD, Kind.BACKWARD))
        expected_ms = sum(e.duration_ns for e in computed) / job.steps / MS
        assert parts.computation == pytest.approx(expected_ms, abs=1e-6)
        assert parts.straggler_wait + parts.exposed_communication == pytest.approx(
            sum(e.duration_ns for e in trace.events[rank].of_kind(Kind.WAIT)) / job.steps / MS, abs=1e-6
        )


@pytest.mark.parametrize("world_size", [2, 4, 7])
@pytest.mark.parametrize("blocking_loss", [False, True])
@pytest.mark.parametrize("part", ["forward", "backward", "input", "optimizer", "rest"])
def test_a_slow_rank_is_blamed_for_what_it_did(part: str, blocking_loss: bool, world_size: int) -> None:
    slow = world_size - 1
    job = SyntheticJob(
        world_size=world_size, slow={(slow, part): 15.0}, blocking_loss=blocking_loss, jitter=0.03
    )
    found = diagnose(synthetic_trace(job))
    assert [straggler.rank for straggler in found.stragglers] == [slow]
    worst = found.stragglers[0]
    assert worst.cause == part
    assert worst.late_ms == pytest.approx(15.0, abs=3)
    assert 7 < worst.blame_ms < 16
    assert found.verdict.startswith(f"Rank {slow} is a straggler")
    assert any(piece.rank == slow and piece.kind == part for piece in found.critical_path)


def test_phases_look_alike_and_arrival_tells() -> None:
    # 200 ms more in rank 1's backward: every rank's backward pass is then as long as rank 1's.
    job = SyntheticJob(backward_ms=80, slow={(1, "backward"): 200.0}, bucket_bytes=(1_000_000,))
    trace = synthetic_trace(job)
    lengths = [
        sum(event.duration_ns for event in events.of_kind(Kind.BACKWARD_PASS))
        for events in trace.events.values()
    ]
    assert max(lengths) - min(lengths) < 0.01 * max(lengths)
    (straggler,) = diagnose(trace).stragglers
    assert (straggler.rank, straggler.cause) == (1, "backward")
    assert straggler.blame_ms == pytest.approx(200, abs=1)
    assert straggler.own_ms == pytest.approx(280, abs=1)
    assert straggler.others_ms == pytest.approx(80, abs=1)


def test_a_rank_slow_now_and_then_is_found() -> None:
    job = SyntheticJob(steps=10, slow={(2, "input"): 60.0}, slow_steps=(3, 7))
    (straggler,) = diagnose(synthetic_trace(job)).stragglers
    assert (straggler.rank, straggler.cause) == (2, "input")
    assert straggler.late_ms == pytest.approx(60, abs=1)


def test_two_slow_ranks_are_both_named_and_the_worse_comes_first() -> None:
    job = SyntheticJob(world_size=5, slow={(0, "backward"): 20.0, (3, "input"): 12.0})
    rows = events_of(replace(job, steps=12))
    found = diagnose(trace_of(rows))
    assert found.stragglers[0].rank == 0
    assert found.stragglers[0].cause == "backward"


def test_blame_passes_to_whom_the_late_rank_waited_for() -> None:
    # Rank 2 comes late to rank 1's group; rank 1 therefore comes late to rank 0's.
    def rank(number: int, own: list[Event]) -> list[Event]:
        return [Event(Kind.STEP, "", Stream.COMPUTE, 0, 0, 100 * MS), *own]

    def collective(group: str, enqueue: int, start: int) -> Event:
        return Event(
            Kind.COLLECTIVE,
            "all_reduce",
            Stream.COMMUNICATION,
            0,
            start * MS,
            5 * MS,
            enqueue * MS,
            group,
            0,
            8,
        )

    def wait(start: int, end: int) -> Event:
        return Event(Kind.WAIT, "all_reduce", Stream.COMPUTE, 0, start * MS, (end - start) * MS)

    def forward(end: int) -> Event:
        return Event(Kind.FORWARD_PASS, "", Stream.COMPUTE, 0, 0, end * MS)

    trace = trace_of(
        {
            0: rank(0, [forward(10), collective("a", 10, 65), wait(10, 70)]),
            1: rank(
                1, [forward(10), collective("b", 10, 60), wait(10, 65), collective("a", 65, 65), wait(65, 70)]
            ),
            2: rank(2, [forward(60), collective("b", 60, 60), wait(60, 65)]),
        }
    )
    found = diagnose(trace)
    assert found.stragglers[0].rank == 2
    assert found.stragglers[0].cause == "forward"
    assert found.stragglers[0].blame_ms == pytest.approx((50 + 50) / 2)
    assert [(piece.rank, piece.kind) for piece in found.critical_path[:2]] == [
        (2, "forward"),
        (1, "collective"),
    ]


def test_noise_is_nobodys_fault() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(jitter=0.02, steps=20)))
    assert found.stragglers == ()
    assert found.verdict.startswith("Nothing stands out: computation is 8")


def test_ranks_late_in_turns_are_not_stragglers_one_by_one() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(jitter=1.5, steps=30)))
    assert "no single rank is to blame" in found.verdict


def test_of_two_ranks_the_one_that_is_late_far_more_is_named() -> None:
    job = SyntheticJob(world_size=2, jitter=0.4, slow={(1, "forward"): 12.0}, steps=30)
    found = diagnose(synthetic_trace(job))
    assert found.stragglers[0].rank == 1
    assert found.verdict.startswith("Rank 1 is a straggler")


def test_a_straggler_beside_slow_links_is_mentioned() -> None:
    job = SyntheticJob(bucket_bytes=(500_000, 12_000_000), slow={(2, "backward"): 18.0})
    found = diagnose(synthetic_trace(job))
    assert found.verdict.startswith("Communication is the bottleneck")
    assert "in addition, the other ranks wait for rank 2" in found.verdict


def test_nothing_wrong_is_said() -> None:
    found = diagnose(synthetic_trace())
    assert found.verdict == "Nothing stands out: computation is 86 % of each 35 ms step, the optimizer 6 %."
    assert found.overlap_percent == pytest.approx(75, abs=0.5)
    assert found.notes == ()


def test_one_big_late_bucket_is_named() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(bucket_bytes=(1_000_000, 33_000_000))))
    assert found.verdict == (
        "Communication is the bottleneck: 60 % of each 83 ms step waits for gradients, because one 33.0 MB bucket "
        "carries 97 % of them and starts only when backward ends; try smaller buckets (headway optimize)."
    )
    assert found.overlap_percent < 5


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (SyntheticJob(bucket_bytes=(10_000_000,) * 4), "because the links are busy for 60.2 ms per step"),
        (SyntheticJob(bucket_bytes=(10_000,) * 100, latency_ms=0.5), "100 collectives of 10.0 kB on average"),
        (
            SyntheticJob(blocking_loss=True, latency_ms=8, bucket_bytes=()),
            "because the program blocks on 1 of them per step",
        ),
        (
            SyntheticJob(bucket_bytes=(20_000_000,)),
            "one 20.0 MB bucket carries all and starts only when backward",
        ),
        (
            SyntheticJob(bucket_bytes=(10_000_000,) * 4),
            "the link is the limit, and other buckets gain little; use a",
        ),
        (
            SyntheticJob(bucket_bytes=(10_000_000,)),
            "one 10.0 MB bucket carries all and starts only when backward",
        ),
        (SyntheticJob(bucket_bytes=(6_000_000,) * 4), "or overlap with forward as well"),
        (
            SyntheticJob(bucket_bytes=(84,), latency_ms=8),
            "only 84 B of gradients: network latency dominates",
        ),
        (SyntheticJob(input_ms=20), "Input is the bottleneck: 37 %"),
        (SyntheticJob(rest_ms=30), "Time outside of the training passes is the bottleneck"),
    ],
)
def test_the_verdict_names_the_bottleneck(job: SyntheticJob, says: str) -> None:
    found = diagnose(synthetic_trace(job))
    assert says in found.verdict
    assert found.stragglers == ()


def test_what_blocks_longest_is_named_and_not_what_blocks_most_often() -> None:
    trace = synthetic_trace(SyntheticJob(blocking_loss=True, latency_ms=8, bucket_bytes=()))
    rows = {
        rank: [
            *events,
            *(_broadcast(events, step, number) for step in trace.steps for number in range(3)),
        ]
        for rank, events in trace.events.items()
    }
    assert "waits for all_reduce and others outside of the gradients" in diagnose(trace_of(rows)).verdict


def test_a_small_collective_that_queues_behind_buckets_is_not_blamed() -> None:
    trace = synthetic_trace(SyntheticJob(bucket_bytes=(1_000_000, 33_000_000)))
    rows = {
        rank: [*events, *(_unused_parameters(events, step) for step in trace.steps)]
        for rank, events in trace.events.items()
    }
    verdict = diagnose(trace_of(rows)).verdict
    assert "waits for gradients, because one 33.0 MB bucket" in verdict
    assert "outside of the gradients" not in verdict


def _unused_parameters(events: Events, step: int) -> Event:
    """DDP's all-reduce of which parameters were unused: called with the last bucket, done a little after it."""
    of_step = [row for row in events if row.kind == Kind.COLLECTIVE and row.step == step]
    last = max(of_step, key=lambda row: row.end_ns)
    return last._replace(
        bucket=-1, sequence=last.sequence + 1000, size_bytes=52, duration_ns=last.duration_ns + 100_000
    )


def _broadcast(events: Events, step: int, number: int) -> Event:
    """A short collective within a step's longest wait."""
    (wait,) = [row for row in events if row.kind == Kind.WAIT and row.step == step]
    start = wait.end_ns - (number + 1) * 10_000
    return Event(
        Kind.COLLECTIVE, "broadcast", Stream.COMMUNICATION, step, start, 5_000,
        enqueue_ns=start, group="1", sequence=3 * step + number, size_bytes=8,
    )  # fmt: skip


@pytest.mark.parametrize("gbps", [0.05, 0.5, 2.0])
def test_no_other_buckets_are_advised_where_they_cannot_help(gbps: float) -> None:
    for sizes in ((1_000_000,) * 4, (300_000,) * 8, (84,)):
        job = SyntheticJob(bucket_bytes=sizes, gbps=gbps, latency_ms=6 if sizes == (84,) else 0.05)
        hidden_ms = job.forward_ms + job.backward_ms
        taken_ms = sum(job.transfer_ms(size) for size in sizes)
        verdict = diagnose(synthetic_trace(job)).verdict
        if taken_ms > 3 * hidden_ms or sizes == (84,):
            assert "buckets (headway optimize)" not in verdict
            assert ("the link is the limit" in verdict) != ("latency" in verdict)


def test_saturated_links_make_the_path() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(bucket_bytes=(10_000_000,) * 4)))
    (piece,) = [piece for piece in found.critical_path if piece.kind == "collective"]
    assert piece.name == "all_reduce (4 buckets)"
    assert piece.ms == pytest.approx(4 * SyntheticJob().transfer_ms(10_000_000))


def test_many_small_modules_stay_themselves_on_the_path() -> None:
    job = SyntheticJob(modules=tuple(f"layer{number}" for number in range(2000)))
    found = diagnose(synthetic_trace(job))
    assert [piece.kind for piece in found.critical_path] == [
        "input", "forward", "backward", "collective", "rest", "optimizer",
    ]  # fmt: skip
    assert found.critical_path[1].ms == pytest.approx(10, abs=0.1)


def test_one_rank_has_nobody_to_wait_for() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(world_size=1)))
    assert found.verdict.startswith(
        "Nothing stands out: computation is 90 % of each 33.5 ms step on the only rank"
    )
    assert found.stragglers == ()
    assert found.links == ()
    assert found.overlap_percent == 0


@settings(max_examples=examples(40), deadline=None)
@given(kinds=st.sets(st.sampled_from([*COMPUTE, Kind.COLLECTIVE])), rank=st.integers(0, 3))
def test_missing_events_are_survived(kinds: set[str], rank: int) -> None:
    trace = synthetic_trace(SyntheticJob(slow={(2, "backward"): 10.0}))
    rows = [event for event in trace.events[rank] if event.kind not in kinds]
    trace.events[rank] = Events.from_rows(rows)
    found = diagnose(trace)
    assert_sums_hold(trace, found)
    if Kind.COLLECTIVE in kinds:
        assert any(f"No communication was recorded on rank {rank}" in note for note in found.notes)


def test_no_common_step_is_refused() -> None:
    trace = synthetic_trace()
    trace.events[1] = Events.from_rows([event for event in trace.events[1] if event.kind != Kind.STEP])
    with pytest.raises(TraceError, match="no step was recorded completely on all ranks"):
        diagnose(trace)


def test_what_was_dropped_is_noted() -> None:
    trace = synthetic_trace()
    infos = (trace.manifest.ranks[0].model_copy(update={"dropped_events": 7}), *trace.manifest.ranks[1:])
    manifest = trace.manifest.model_copy(update={"ranks": infos})
    assert "7 events were dropped" in diagnose(replace(trace, manifest=manifest)).notes[0]


def test_links_carry_what_the_ring_moves() -> None:
    job = SyntheticJob(world_size=4, ranks_a_host=2)
    found = diagnose(synthetic_trace(job))
    assert [(link.source, link.target) for link in found.links] == [("host0", "host1"), ("host1", "host0")]
    busy_ms = sum(job.transfer_ms(size) for size in job.bucket_bytes)
    for link in found.links:
        assert link.gbps == pytest.approx(8e-6 * 2 * 3 / 4 * sum(job.bucket_bytes) / busy_ms)
        assert link.utilisation == pytest.approx(busy_ms / found.step_ms)


def test_links_are_held_against_a_cluster() -> None:
    job = SyntheticJob(world_size=2)
    hosts = tuple(Host(name=name, workers=1, up_gbps=16, down_gbps=10) for name in ("left", "right"))
    found = diagnose(synthetic_trace(job), Cluster(hosts=hosts))
    volume = sum(job.bucket_bytes)
    assert [(link.source, link.target, link.capacity_gbps) for link in found.links] == [
        ("left", "right", 10),
        ("right", "left", 10),
    ]
    assert found.links[0].utilisation == pytest.approx(8e-6 * volume / found.step_ms / 10)
    with pytest.raises(ClusterError, match="does not match the trace"):
        diagnose(synthetic_trace(), Cluster(hosts=hosts))


def test_one_hosts_memory_is_its_only_link() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(ranks_a_host=4)))
    assert [(link.source, link.target) for link in found.links] == [("host0", "host0")]


def test_the_document_keeps_its_contract() -> None:
    found = diagnose(synthetic_trace(SyntheticJob(slow={(2, "backward"): 15.0})))
    document = json.loads(files.dump_json(found.to_document()))
    assert document["kind"] == "diagnosis"
    assert document["verdict"] == found.verdict
    assert set(document["breakdown_ms"]) == {"0", "1", "2", "3"}
    for parts in document["breakdown_ms"].values():
        assert sum(parts.values()) == pytest.approx(document["step_ms"], rel=1e-3)
    first = document["findings"][0]
    assert (first["cause"], first["ranks"], first["stands_out"]) == ("straggler", [2], True)
    assert {one["stands_out"] for one in document["findings"]} <= {True, False}
    assert set(document["stragglers"][0]) >= {"rank", "blame_ms", "cause"}
    assert set(document["critical_path"][0]) == {"rank", "kind", "name", "ms"}
    assert document["clock"]["2"] == {"offset_us": 3.0, "drift_ppm": 1.0, "uncertainty_us": 2.0}
    assert set(document["links"][0]) == {"from", "to", "gbps", "utilisation"}
