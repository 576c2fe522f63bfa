"""Slow links and other traffic, from what connections carried and at which rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis.truth import JOB, found_in, only_finding, planted_ms, standing
from tests.exhaustive import examples
from tests.synthetic import Connections, SyntheticJob, synthetic_trace, with_ranks

from headway.diagnosis import diagnose
from headway.diagnosis.diagnosis import Diagnosis
from headway.diagnosis.network import SlowLink, slowest_of_shared_waits
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Trace

LARGE = replace(JOB, bucket_bytes=(4_000_000,) * 4)
NOISY = Connections(spread=0.3)


def linked(job: SyntheticJob = LARGE, **connections: object) -> SyntheticJob:
    return replace(job, connections=replace(NOISY, **connections))  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [0.1, 0.35])
def test_a_slow_link(factor: float, world_size: int) -> None:
    job = linked(replace(LARGE, world_size=world_size), gbps={(0, 1): 8 * factor})
    finding = only_finding(found_in(job), "slow_link")
    assert finding.ranks == (0, 1)
    assert finding.sentence.startswith("The link from host0 to host1 is slow: it delivers ")
    assert "where 8 Gbit/s is usual" in finding.sentence
    assert finding.cost_ms == pytest.approx(planted_ms(job, connections=Connections()), rel=0.15)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("every", [2, 3, 8])
def test_other_traffic_at_times(every: int, world_size: int) -> None:
    job = linked(
        replace(LARGE, world_size=world_size), gbps={(1, (2 % world_size)): 0.8}, steps=range(0, 30, every)
    )
    finding = only_finding(found_in(job), "other_traffic")
    assert finding.ranks == (1, 2 % world_size)
    assert "carries other traffic at times" in finding.sentence
    assert "it delivers 800 Mbit/s where 8 Gbit/s is usual" in finding.sentence
    assert finding.cost_ms == pytest.approx(planted_ms(job, connections=Connections()), rel=0.1)


def test_busy_for_late_acknowledgements_is_not_slow() -> None:
    found = found_in(linked(held_up={(0, 1): 30.0, (2, 3): 5.0}))
    assert standing(found) == ["communication"]
    held = found_in(linked(held_up={(0, 1): 30.0}, gbps={(2, 3): 1.0}))
    assert only_finding(held, "slow_link").ranks == (2, 3)


def test_of_neighbours_that_share_their_waits_the_slowest_is_named() -> None:
    """Other traffic from host1 to host2 delays the acknowledgements of what host0 sends to host1."""

    def link(source: int, gbps: float, cost_ms: float) -> SlowLink:
        ranks = (source, source + 1)
        return SlowLink(f"host{source}", f"host{source + 1}", ranks, gbps, 8.0, 1.0, cost_ms)

    behind, taken, after = link(0, 3.0, 15.0), link(1, 2.0, 13.0), link(2, 2.5, 14.0)
    for costliest in (behind, taken, after):
        assert slowest_of_shared_waits(costliest, [behind, taken, after]) is taken
    elsewhere, slight = link(4, 1.0, 14.0), replace(taken, cost_ms=5.0)
    assert slowest_of_shared_waits(behind, [behind, slight, elsewhere]) is behind


@pytest.mark.parametrize("gbps", [0.5, 4.0])
def test_links_that_are_all_alike_slow_are_not_named(gbps: float) -> None:
    job = linked(gbps={(rank, (rank + 1) % 4): gbps for rank in range(4)})
    assert only_finding(found_in(job), "communication").ranks == ()


@pytest.mark.parametrize(("world_size", "a_host"), [(4, 2), (8, 4), (6, 2), (4, 4)])
def test_workers_of_one_host_make_its_links_not_look_slow(world_size: int, a_host: int) -> None:
    job = linked(replace(LARGE, world_size=world_size, ranks_a_host=a_host))
    assert "slow_link" not in [one.cause for one in found_in(job).findings]


@pytest.mark.parametrize("world_size", [8, 12])
def test_a_slow_link_between_hosts_of_several_workers(world_size: int) -> None:
    job = linked(replace(LARGE, world_size=world_size, ranks_a_host=4), gbps={(3, 4): 1.0})
    finding = only_finding(found_in(job), "slow_link")
    assert finding.sentence.startswith(
        "The link from host0 to host1 is slow: it delivers 1 Gbit/s where 8 Gbit/s"
    )
    assert finding.ranks == (3, 4)


def test_little_is_said_where_little_is_counted() -> None:
    slow = linked(gbps={(1, 2): 1.0})
    assert standing(found_in(linked(gbps={(1, 2): 1.0}, counted=False))) == ["communication"]
    trace = synthetic_trace(slow)
    for events in (trace.events[1], trace.events[2]):
        rates = without(events, Kind.DELIVERY_RATE)
        assert named(replace(trace, events={**trace.events, 1: rates})) is None
    # Who does not count is no reason not to believe the others.
    for rank in (0, 3):
        fewer = {**trace.events, rank: without(trace.events[rank], Kind.LINK, Kind.DELIVERY_RATE)}
        assert named(replace(trace, events=fewer)) == (1, 2)
    unknown = with_ranks(trace, {2: {"host": ""}})
    assert named(unknown) != (1, 2)


def test_peers_that_the_trace_lacks_are_passed_over() -> None:
    trace = synthetic_trace(linked(gbps={(1, 2): 1.0}))
    infos = tuple(info for info in trace.manifest.ranks if info.rank != 2)
    events = {rank: rows for rank, rows in trace.events.items() if rank != 2}
    few = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": infos}), events=events)
    assert named(few) is None


def test_an_idle_connection_beside_does_not_speak_for_the_link() -> None:
    trace = synthetic_trace(linked(replace(LARGE, rest_ms=30.0), held_up={(1, 2): 30.0}))
    slow = [
        Event(kind, "", Stream.COMMUNICATION, step, start, length, size_bytes=size, peer=2)
        for step, start, end in steps_of(trace, 1)
        for kind, start, length, size in (
            (Kind.LINK, start, 1000, 70_000),
            (Kind.DELIVERY_RATE, end, 0, 1_000_000),
        )
    ]
    rows = Events.concatenated([trace.events[1], Events.from_rows(slow)])
    assert named(replace(trace, events={**trace.events, 1: rows})) is None


def test_small_messages_say_nothing_of_a_link() -> None:
    job = replace(JOB, bucket_bytes=(4_000,) * 4, connections=Connections({(0, 1): 0.5}))
    assert standing(found_in(job)) == []


def test_a_slow_link_that_nobody_waits_for_is_not_told() -> None:
    job = replace(JOB, bucket_bytes=(900_000, 100_000), connections=Connections({(2, 3): 3.5}))
    found = found_in(job)
    assert standing(found) == []
    (slow,) = [one for one in found.findings if one.cause == "slow_link"]
    assert slow.cost_ms < 0.05 * found.step_ms


def test_rates_that_overflow_are_survived() -> None:
    trace = synthetic_trace(linked())
    for events in trace.events.values():
        events.size_bytes[events.kind == Kind.DELIVERY_RATE] = 2**62
        events.size_bytes[events.kind == Kind.LINK] = 2**62
        events.duration_ns[events.kind == Kind.LINK] = 2**62
    assert named(trace) is None


@settings(max_examples=examples(25), deadline=None)
@given(
    world_size=st.integers(2, 6),
    source=st.integers(0, 5),
    factor=st.floats(0.05, 0.3),
    share=st.sampled_from([0.2, 0.4, 1.0]),
    seed=st.integers(0, 100),
)
def test_any_planted_link_is_found_at_its_cost(
    world_size: int, source: int, factor: float, share: float, seed: int
) -> None:
    pair = source % world_size, (source + 1) % world_size
    steps = frozenset(np.random.default_rng(seed).permutation(30)[: round(share * 30)].tolist())
    job = linked(replace(LARGE, world_size=world_size, seed=seed), gbps={pair: 8 * factor}, steps=steps)
    found = found_in(job)
    finding = next(
        one for one in found.findings if one.cause == ("slow_link" if share == 1 else "other_traffic")
    )
    assert finding.stands_out
    assert set(standing(found)) <= {finding.cause, "communication"}  # what it costs without is told besides
    assert finding.ranks == pair
    assert finding.cost_ms == pytest.approx(planted_ms(job, connections=Connections()), rel=0.2)


def named(trace: Trace) -> tuple[int, ...] | None:
    """The ranks of the link that the diagnosis finds, if any."""
    found: Diagnosis = diagnose(trace)
    return next((one.ranks for one in found.findings if one.cause in ("slow_link", "other_traffic")), None)


def without(events: Events, *kinds: str) -> Events:
    return events.where(~np.isin(events.kind.astype(str), kinds))


def steps_of(trace: Trace, rank: int) -> list[tuple[int, int, int]]:
    return [(row.step, row.start_ns, row.end_ns) for row in trace.events[rank].of_kind(Kind.STEP)]
