from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clocks.jobs import BEGIN_NS, MS, SECOND, US, Clock, collectives, messages, recovered, skewed
from tests.exhaustive import examples

from headway.clocks import fit_clocks, meetings_of
from headway.clocks.comparing import UNKNOWN_NS
from headway.trace.events import Events, Kind, Stream
from headway.trace.format import ClockFit


@pytest.mark.parametrize("late_us", [5.0, 50.0, 500.0])
def test_offsets_and_drifts_are_recovered_within_the_jitter_and_the_uncertainty_covers(
    late_us: float,
) -> None:
    covered, uncertainty_us = [], []
    for seed in range(8):
        clocks = skewed(2 + seed, seed)
        done = recovered(collectives(len(clocks), late_us=late_us, seed=seed), clocks)
        for name in list(clocks)[1:]:
            assert done.error_us[name] < 5 + late_us
            covered.append(done.covered(name))
            uncertainty_us.append(done.fits[name].uncertainty_ns / US)
        assert done.fits["host 0"] == ClockFit()
    assert np.mean(covered) >= 0.95
    assert np.median(uncertainty_us) < 300 + 4 * late_us


def test_a_host_that_always_ends_first_is_within_the_uncertainty() -> None:
    for seed in range(5):
        clocks = skewed(4, seed)
        late_us = {1: 100.0, 2: 100.0, 3: 100.0}  # host 0 is through first
        done = recovered(collectives(4, always_late_us=late_us, seed=seed), clocks)
        assert all(done.covered(name) for name in clocks)
        assert max(done.error_us.values()) < 150


def test_a_straggler_does_not_move_its_clock() -> None:
    clocks = skewed(4)
    done = recovered(collectives(4, comes_late_us={3: 30_000.0}), clocks)
    assert done.error_us["host 3"] < 30
    assert done.covered("host 3")


def test_hosts_that_only_meet_their_neighbours_are_aligned_through_these() -> None:
    clocks = skewed(5)
    done = recovered(messages([0, 1, 2, 3, 4]), clocks)
    assert all(done.covered(name) for name in clocks)
    assert max(done.error_us.values()) < 100
    assert done.fits["host 4"].uncertainty_ns > 1.5 * done.fits["host 1"].uncertainty_ns


def test_messages_one_way_bound_one_side_only() -> None:
    clocks = skewed(2)
    done = recovered(messages([0, 1], back=False), clocks)
    assert done.fits["host 1"].uncertainty_ns == UNKNOWN_NS
    assert done.error_us["host 1"] < 500  # a message is there soon after it was sent


def test_clocks_that_met_only_each_other_are_said_to_be_unknown() -> None:
    clocks = skewed(5)
    jobs = collectives(2) | {2 + rank: events for rank, events in collectives(2, seed=1).items()}
    jobs |= {4: replace(jobs[0], sequence=jobs[0].sequence + 10**6)}
    jobs |= {rank: replace(jobs[rank], group=np.full(len(jobs[rank]), "other", object)) for rank in (2, 3)}
    done = recovered(jobs, clocks)
    assert done.covered("host 1")
    assert done.fits["host 1"].uncertainty_ns < MS
    assert [done.fits[f"host {n}"].uncertainty_ns for n in (2, 3, 4)] == [UNKNOWN_NS] * 3
    assert done.fits["host 2"].offset_ns == done.fits["host 4"].offset_ns == 0.0
    apart_ms = clocks["host 3"].offset_ms - clocks["host 2"].offset_ms
    assert done.fits["host 3"].offset_ns / MS == pytest.approx(apart_ms, abs=2)


def test_broadcasts_say_something_and_order_clocks_where_roots_are_known() -> None:
    clocks = skewed(2)
    broadcast = np.full(200, "broadcast", dtype=object)
    jobs = {rank: replace(own, name=broadcast) for rank, own in collectives(2, took_us=[150.0]).items()}
    loose = recovered(jobs, clocks)
    assert loose.error_us["host 1"] < 100
    assert loose.fits["host 1"].uncertainty_ns == UNKNOWN_NS
    rooted = recovered({rank: replace(own, peer=np.arange(200) % 2) for rank, own in jobs.items()}, clocks)
    assert rooted.covered("host 1")
    assert rooted.fits["host 1"].uncertainty_ns < MS


def test_one_clock_needs_nothing_and_no_clock_is_lost() -> None:
    jobs = collectives(2)
    alone = meetings_of(jobs, {0: "a", 1: "a"})
    assert fit_clocks(alone, ["a"]) == {"a": ClockFit()}
    assert fit_clocks(alone, ["a", "never seen"])["never seen"].uncertainty_ns == UNKNOWN_NS
    assert fit_clocks(meetings_of({}, {}), ["a"]) == {"a": ClockFit()}


def test_the_first_clock_that_is_named_keeps_its_time() -> None:
    shown = {
        rank: clock.read(own)
        for (rank, own), clock in zip(collectives(2).items(), skewed(2).values(), strict=True)
    }
    meetings = meetings_of(shown, {0: "a", 1: "b"})
    forth, back = fit_clocks(meetings, ["a", "b"])["b"], fit_clocks(meetings, ["b", "a"])["a"]
    assert back.offset_ns == pytest.approx(-forth.offset_ns, abs=2 * MS)
    assert back.drift_ppm == pytest.approx(-forth.drift_ppm, abs=0.1)


def test_many_ranks_on_few_hosts() -> None:
    clocks = skewed(2)
    of_rank = {rank: f"host {rank // 512}" for rank in range(1024)}
    done = recovered(collectives(1024, 50), clocks, of_rank)
    assert done.covered("host 1")
    assert done.error_us["host 1"] < 50


@pytest.mark.parametrize("epoch_ns", [0, 2**60 + 12345, 2**62 - 200 * SECOND])
def test_large_times_cost_no_precision(epoch_ns: int) -> None:
    offsets = {"a": Clock(), "b": Clock(-20, 0.0, epoch_ns), "c": Clock(30, -40, epoch_ns)}
    plain = {name: replace(clock, epoch_ns=0) for name, clock in offsets.items()}
    jobs = collectives(3)
    far, near = recovered(jobs, offsets), recovered(jobs, plain)
    for name in offsets:
        assert far.error_us[name] == pytest.approx(near.error_us[name], abs=0.01)


def prior(clock: Clock, wrong_us: float, uncertainty_us: float) -> ClockFit:
    """What round trips would give: at the middle of the job by so much wrong."""
    middle_ns = BEGIN_NS + 10 * SECOND
    own_ns = int(clock.read_ns(np.array([middle_ns]))[0])
    return ClockFit(
        offset_ns=middle_ns - own_ns + wrong_us * US, drift_ppm=clock.drift_ppm, reference_ns=own_ns,
        uncertainty_ns=uncertainty_us * US,
    )  # fmt: skip


def test_what_was_known_before_and_meetings_are_used_together() -> None:
    clocks = skewed(3)
    jobs = collectives(3, always_late_us={1: 100.0, 2: 100.0}, late_us=10.0)
    alone = recovered(jobs, clocks)
    known = {name: prior(clocks[name], 10.0, 25.0) for name in ("host 1", "host 2")}
    done = recovered(jobs, clocks, prior=known)
    vague = recovered(jobs, clocks, prior={name: prior(clocks[name], 900.0, 1000.0) for name in known})
    for name in known:
        assert alone.error_us[name] > 30
        assert done.error_us[name] < 26
        assert done.fits[name].uncertainty_ns < 60 * US < alone.fits[name].uncertainty_ns
        assert vague.error_us[name] < 150
        assert done.covered(name)
        assert vague.covered(name)


def test_what_was_known_is_kept_of_clocks_that_met_nobody() -> None:
    known = {"b": ClockFit(offset_ns=5.0, uncertainty_ns=7.0), "c": ClockFit(uncertainty_ns=UNKNOWN_NS)}
    meetings = meetings_of({rank: collectives(1)[0] for rank in range(3)}, {0: "a", 1: "a", 2: "a"})
    fits = fit_clocks(meetings, ["a", "b", "c"], prior=known)
    assert fits["b"] == known["b"]
    assert fits["c"].uncertainty_ns == UNKNOWN_NS


@pytest.mark.parametrize("uncertainty_us", [0.0, 10.0])
def test_a_prior_that_meetings_contradict_makes_the_uncertainty_grow(uncertainty_us: float) -> None:
    clocks = skewed(3)
    done = recovered(
        collectives(3), clocks, prior={"host 1": prior(clocks["host 1"], 5000.0, uncertainty_us)}
    )
    assert done.covered("host 1")
    assert done.fits["host 1"].uncertainty_ns > 4 * MS
    assert done.covered("host 2")


def test_meetings_that_contradict_each_other_make_the_uncertainty_grow() -> None:
    clocks = skewed(2)
    jobs = collectives(2)
    agreed = recovered(jobs, clocks)
    # A third of what rank 1 saw is off by 4 ms; or its clock was set back in the middle.
    moved = replace(jobs[1], start_ns=jobs[1].start_ns + 4 * MS * (np.arange(len(jobs[1])) % 3 == 0))
    torn = recovered(
        {0: jobs[0], 1: Events.from_columns(**{f: getattr(moved, f) for f in moved.__slots__})}, clocks
    )
    set_back = replace(jobs[1], start_ns=jobs[1].start_ns - 4 * MS * (np.arange(len(jobs[1])) > 100))
    stepped = recovered({0: jobs[0], 1: set_back}, clocks)
    assert agreed.fits["host 1"].uncertainty_ns < MS / 2
    assert torn.covered("host 1")  # most are right
    assert stepped.fits["host 1"].uncertainty_ns > MS / 2


def test_collectives_with_wrong_numbers_do_little_harm() -> None:
    random = np.random.default_rng(0)
    clocks = skewed(4)
    jobs = {
        rank: replace(
            own, sequence=np.where(random.uniform(size=len(own)) < 0.1, own.sequence + 3, own.sequence)
        )
        for rank, own in collectives(4).items()
    }
    done = recovered(jobs, clocks)
    assert max(done.error_us.values()) < 30
    assert all(done.covered(name) for name in clocks)


def test_a_drift_that_no_clock_has_is_not_believed() -> None:
    clocks = {"a": Clock(), "b": Clock(0, 900)}
    done = recovered(collectives(2), clocks)
    assert done.fits["b"].drift_ppm == pytest.approx(500)
    assert done.fits["b"].uncertainty_ns > MS


def test_far_from_all_meetings_the_uncertainty_grows() -> None:
    jobs = collectives(2, 40, seconds=2.0)
    later = Events.from_columns(
        kind=Kind.FORWARD, stream=Stream.COMPUTE, start_ns=np.array([BEGIN_NS + 60 * SECOND])
    )
    clocks = skewed(2)
    near = recovered(jobs, clocks)
    far = recovered({0: Events.concatenated([jobs[0], later]), 1: jobs[1]}, clocks)
    assert far.covered("host 1")
    assert far.fits["host 1"].uncertainty_ns > near.fits["host 1"].uncertainty_ns + MS


def test_ends_that_all_tie_leave_what_the_quickest_took() -> None:
    start_ns = BEGIN_NS + np.arange(50) * 100 * MS
    tied = Events.from_columns(
        kind=Kind.COLLECTIVE, name="barrier", stream=Stream.COMMUNICATION, start_ns=start_ns,
        duration_ns=np.full(50, 100 * US), sequence=np.arange(50),
    )  # fmt: skip
    done = recovered({0: tied, 1: tied}, skewed(2))
    assert done.error_us["host 1"] < 0.1
    assert done.fits["host 1"].uncertainty_ns < 150 * US


@settings(max_examples=examples(20), deadline=None)  # each draws some thousand numbers
@given(st.data())
def test_no_events_whatever_make_it_fail(data: st.DataObject) -> None:
    times = st.one_of(st.integers(0, 2**62), st.integers(10**9, 10**9 + 10**6), st.integers(-(2**62), 0))
    count = data.draw(st.integers(0, 30))
    rank = {}
    for number in range(data.draw(st.integers(1, 4))):
        column = {
            name: np.array(data.draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype)
            for name, values, dtype in (
                ("kind", st.sampled_from([Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE, Kind.STEP]), object),
                ("name", st.sampled_from(["all_reduce", "broadcast", "reduce", "barrier", "?"]), object),
                ("start_ns", times, np.int64),
                ("duration_ns", st.integers(-5, 2**61), np.int64),
                ("sequence", st.integers(-1, 6), np.int64),
                ("peer", st.integers(-1, 4), np.int64),
                ("enqueue_ns", st.integers(-1, 2**62), np.int64),
            )
        }
        rank[number] = Events.from_columns(stream=Stream.COMMUNICATION, **column)
    of_rank = {number: f"clock {number}" for number in rank}
    known = {"clock 1": ClockFit(offset_ns=1e6, drift_ppm=3.0, uncertainty_ns=1e3)}
    fits = fit_clocks(
        meetings_of(rank, of_rank), list(of_rank.values()), prior=data.draw(st.sampled_from([known, None]))
    )
    assert list(fits) == list(of_rank.values())
    assert all(np.isfinite([fit.offset_ns, fit.drift_ppm, fit.uncertainty_ns]).all() for fit in fits.values())
    assert all(0 <= fit.uncertainty_ns <= UNKNOWN_NS for fit in fits.values())
