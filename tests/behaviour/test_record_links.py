"""What recordings say of messages, connections and pauses; and that neither training nor its end depends on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import workers
from tests.behaviour.record_link_cases import SHORT_S

import headway
from headway.collectives.algorithms import RING, sent_bytes
from headway.diagnosis.diagnosis import diagnose
from headway.recording.watches import CHECKPOINT, COLLECTION
from headway.trace.events import Event, Kind
from headway.trace.format import Trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

CASES = "tests.behaviour.record_link_cases"
RANKS = 3
SLACK_S = 30.0  # for what a busy machine takes besides


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("links")
    ranks = workers.run(RANKS, f"{CASES}:decoupled_jobs", str(folder), timeout_s=100)
    return headway.load_trace(folder / "trace"), ranks


def test_watching_does_not_change_numbers(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    assert len({digest for rank in done[1] for digest in rank["digests"]}) == 1


def test_nobody_is_told_of_messages_unasked(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    for rank in done[1]:
        assert rank["collectives"] > 0
        assert rank["unwanted"] == 0


def test_collectives_beside_each_other_have_their_own_messages(
    done: tuple[Trace, list[dict[str, Any]]],
) -> None:
    for rank in done[1]:
        assert rank["wrong"] == []


def messages(trace: Trace, rank: int) -> list[Event]:
    return list(trace.events[rank].of_kind(Kind.SEND, Kind.RECEIVE))


def key(event: Event) -> tuple[str, int, str]:
    return event.group, event.sequence, event.name


def test_recorded_messages_are_those_of_recorded_collectives(
    done: tuple[Trace, list[dict[str, Any]]],
) -> None:
    trace = done[0]
    for rank in range(RANKS):
        collectives = {key(event): event for event in trace.events[rank].of_kind(Kind.COLLECTIVE)}
        ring = {name: event for name, event in collectives.items() if event.algorithm == RING}
        assert {event.name for event in ring.values()} == {"reduce_scatter", "all_gather"}
        sent: Counter[tuple[str, int, str]] = Counter()
        for event in messages(trace, rank):
            whole = ring[key(event)]
            assert (event.bucket, event.step) == (whole.bucket, whole.step)
            assert whole.start_ns <= event.start_ns <= event.end_ns <= whole.end_ns
            assert event.peer == (rank + (1 if event.kind == Kind.SEND else -1)) % RANKS
            sent[key(event)] += event.size_bytes if event.kind == Kind.SEND else 0
        assert set(sent) == set(ring)
        for name, event in ring.items():
            assert abs(sent[name] - sent_bytes(RING, event.name, RANKS, event.size_bytes)) <= 4 * RANKS


def test_what_one_rank_sent_another_received(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace = done[0]
    # A rank may have ended the first recorded step's collectives when another had not begun to record.
    inside = trace.steps[1:-1]
    sent: Counter[tuple[object, ...]] = Counter()
    received: Counter[tuple[object, ...]] = Counter()
    on_all: set[tuple[str, int, str]] = set()
    for rank in range(RANKS):
        for event in messages(trace, rank):
            if event.kind == Kind.SEND:
                sent[rank, event.peer, *key(event), event.size_bytes] += 1
            else:
                received[event.peer, rank, *key(event), event.size_bytes] += 1
        whole = {key(event) for event in messages(trace, rank) if event.step in inside}
        on_all = whole if rank == 0 else on_all & whole
    assert on_all
    for one, count in sent.items():
        assert one[2:5] not in on_all or received[one] == count


def test_messages_do_not_change_the_diagnosis_of_a_recording(
    done: tuple[Trace, list[dict[str, Any]]],
) -> None:
    trace = done[0]
    bare = replace(
        trace,
        events={
            rank: events.where((events.kind != Kind.SEND) & (events.kind != Kind.RECEIVE))
            for rank, events in trace.events.items()
        },
    )
    assert sum(map(len, bare.events.values())) < sum(map(len, trace.events.values()))
    assert diagnose(bare) == diagnose(trace)


def test_the_kernel_counts_what_messages_carried(done: tuple[Trace, list[dict[str, Any]]]) -> None:
    trace = done[0]
    for rank, events in trace.events.items():
        links = events.of_kind(Kind.LINK)
        right = (rank + 1) % RANKS
        carried = int(links.size_bytes[links.peer == right].sum())
        sent = sum(event.size_bytes for event in messages(trace, rank) if event.kind == Kind.SEND)
        # A step ends while gathers are in flight: what the kernel counts then is up to a step's worth apart.
        assert 0.7 * sent < carried < 1.4 * sent
        assert set(links.step.tolist()) <= set(trace.steps)


def test_peers_are_ranks_of_the_job_where_some_of_them_train(
    done: tuple[Trace, list[dict[str, Any]]],
) -> None:
    assert [rank["peers"] for rank in done[1]] == [[2], [], [0]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("cases")
    return folder, workers.run(2, f"{CASES}:in_turn", str(folder), timeout_s=100)


def check_training_went_on(seen: dict[str, Any]) -> None:
    assert seen["finished"]
    # It waits for clocks and for connections, and nothing else.
    assert seen["took_s"] < 2 * SHORT_S + SLACK_S


def test_training_goes_on_without_a_peer(tmp_path: Path) -> None:
    *here, gone = workers.launch(RANKS, f"{CASES}:a_peer_is_gone", str(tmp_path), timeout_s=100)
    assert gone.result is None
    for worker in here:
        assert worker.status == 0, worker.output
        check_training_went_on(worker.result)
        assert f"rank-{worker.rank:05d}.parquet" in worker.result["written"]


def test_training_goes_on_without_the_store(cases: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank, seen in enumerate(cases[1]):
        check_training_went_on(seen["the_store_is_gone"])
        assert f"rank-{rank:05d}.parquet" in seen["the_store_is_gone"]["written"]


def test_training_goes_on_whatever_keeps_a_recording_from_being_written(
    cases: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank, seen in enumerate(cases[1]):
        check_training_went_on(seen["writing_fails"])
        written = set(seen["writing_fails"]["written"])  # by all ranks so far: they share the folder
        assert (
            f"status-{rank:05d}.json"
            in written
            <= {f"status-{other:05d}.json" for other in range(len(cases[1]))}
        )
        assert f"rank {rank} could not write its recording" in seen["writing_fails"]["said"]


def test_no_port_is_opened_where_none_may_be(cases: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank, seen in enumerate(cases[1]):
        before, during, servers = seen["open_ports"]["False"]
        assert (len(during) - len(before), servers) == (0, 0)
        before, during, servers = seen["open_ports"]["True"]
        assert (len(during) - len(before), servers) == ((1, 1) if rank == 0 else (0, 0)), (
            "or else this test sees nothing"
        )
        assert all(address == "127.0.0.1" for address in during), "a job on the loopback listens there alone"


def test_pauses_of_a_job_are_recorded_and_nothing_stays(cases: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [seen["native_pauses"] for seen in cases[1]] == [{"undone": True}] * 2
    for events in headway.load_trace(cases[0] / "native_pauses" / "trace").events.values():
        paused = [(row.step, row.name) for row in events.of_kind(Kind.PAUSE)]
        assert paused == [(2, CHECKPOINT), (3, COLLECTION)]
        works = [row for row in events.of_kind(Kind.WAIT) if row.name == "work"]
        assert sorted({row.step for row in works}) == [1, 2, 3]
