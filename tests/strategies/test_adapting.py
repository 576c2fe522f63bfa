"""Adapting: when a job is said to have changed, and when it is tuned again."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.planning.jobs import Alone

from headway.strategies.adaptive import proposer as planned_proposer
from headway.strategies.adaptive.adapter import (
    LEAST_GAIN,
    MOST_RESTS_PER_STEP,
    RESTS_PER_STEP,
    Adapter,
    RankWindow,
    Window,
    joined,
)
from headway.strategies.adaptive.counting import Interval
from headway.strategies.adaptive.planning_process import Shortlist
from headway.strategies.adaptive.proposals import Tuned
from headway.strategies.adaptive.proposer import CautiousProposer
from headway.strategies.adaptive.watching import Sums, Traffic, gained, rank_window
from headway.strategies.candidates import Candidate
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.channels.observer import Collective
from headway.strategies.parameter_server.policy import ParameterServerStrategy


def window(
    step: int, *, step_ms: float = 100.0, waited_ms: tuple[float, ...] = (20.0, 20.0), byte_ns: float = 8.0,
    uncertainty_ms: float = 0.5,
) -> Window:  # fmt: skip
    return Window(step, tuple(RankWindow(step_ms, uncertainty_ms, each, byte_ns) for each in waited_ms))


def told(*windows: Window, adapter: Adapter | None = None) -> Adapter:
    adapter = adapter or Adapter()
    for each in windows:
        adapter = adapter.after(each)
    return adapter


slow = partial(window, step_ms=150.0, waited_ms=(70.0, 70.0), byte_ns=30.0)
fast = partial(window, step_ms=85.0, waited_ms=(5.0, 5.0), byte_ns=2.0)
late = partial(window, step_ms=200.0, waited_ms=(120.0, 20.0))  # rank 1 computes 180 ms instead of 80


def waited_for(step: int) -> Window:
    """As ``late``, as ranks that wait within their collectives see it."""
    ranks = late(step, waited_ms=(120.0, 20.0, 120.0)).ranks
    return Window(step, tuple(each._replace(byte_ns=8.0 if n == 1 else 40.0) for n, each in enumerate(ranks)))


longer = partial(window, step_ms=150.0, waited_ms=(10.0, 10.0))


def settled() -> Adapter:
    return told(*(window(10 * number) for number in range(1, 4)))


def test_nothing_is_done_while_steps_are_as_they_were() -> None:
    adapter = settled()
    for number in range(4, 40):
        adapter = adapter.after(window(10 * number, step_ms=100 + 4 * (-1) ** number))
        assert adapter.latest is not None
        assert not adapter.latest.tunes
        assert "as they were" in adapter.latest.reason


def test_a_slower_network_is_tuned_for_once_two_windows_show_it() -> None:
    adapter = told(slow(40), adapter=settled())
    assert adapter.latest is not None
    assert not adapter.latest.tunes
    assert "chance" in adapter.latest.reason
    adapter = adapter.after(slow(50))
    assert adapter.latest is not None
    assert adapter.latest.tunes
    assert "a byte of gradients takes 3.75 times as long" in adapter.latest.reason


def test_a_faster_network_is_tuned_for_too() -> None:
    adapter = told(fast(40), fast(50), adapter=settled())
    assert adapter.latest is not None
    assert adapter.latest.tunes


def test_one_slow_window_between_others_is_chance() -> None:
    adapter = told(window(40, step_ms=150.0), window(50), window(60, step_ms=150.0), adapter=settled())
    assert adapter.latest is not None
    assert not adapter.latest.tunes


def test_slow_and_fast_in_turn_are_no_change() -> None:
    adapter = told(window(40, step_ms=150.0), window(50, step_ms=60.0), adapter=settled())
    assert adapter.latest is not None
    assert not adapter.latest.tunes


def test_noise_of_the_steps_counts() -> None:
    noisy = [window(10 * n, uncertainty_ms=15.0, step_ms=100 + 15 * (n % 2)) for n in range(1, 12)]
    adapter = Adapter()
    for each in noisy:
        adapter = adapter.after(each)
        assert adapter.latest is not None
        assert not adapter.latest.tunes


def test_a_straggler_is_named_and_no_schedule_is_sought() -> None:
    adapter = told(late(40), late(50), adapter=settled())
    assert adapter.latest is not None
    assert not adapter.latest.tunes
    assert "rank 1 computes 2.25 times as long" in adapter.latest.reason
    assert "partial all-reduce" in adapter.latest.reason
    after = adapter.after(late(60))  # what later steps are compared with
    assert after.latest is not None
    assert "as they were" in after.latest.reason


def test_a_straggler_that_others_wait_for_is_no_slow_network() -> None:
    adapter = told(*(window(10 * number, waited_ms=(20.0,) * 3) for number in range(1, 4)))
    adapter = told(waited_for(40), waited_for(50), adapter=adapter)
    assert adapter.latest is not None
    assert not adapter.latest.tunes
    assert "rank 1 computes 2.25 times as long" in adapter.latest.reason


def test_ranks_that_hardly_compute_are_no_stragglers() -> None:
    adapter = told(*(window(10 * number, waited_ms=(20.0, 100.0)) for number in range(1, 4)))
    adapter = told(*(window(10 * n, step_ms=150.0, waited_ms=(70.0, 149.9)) for n in (4, 5)), adapter=adapter)
    assert adapter.latest is not None
    assert adapter.latest.tunes
    assert "rank" not in adapter.latest.reason


def test_where_all_compute_longer_the_schedule_is_tuned() -> None:
    adapter = told(longer(40), longer(50), adapter=settled())
    assert adapter.latest is not None
    assert adapter.latest.tunes


def test_after_a_tuning_it_rests_for_longer_where_that_gained_nothing() -> None:
    adapter = settled().tuned(1000, 40, gain=0.3)
    assert adapter.rests_until == 1000 + RESTS_PER_STEP * 40
    adapter = told(window(1010), slow(1020), slow(1030), adapter=adapter)
    assert adapter.latest is not None
    assert not adapter.latest.tunes
    assert "from step 1400 on" in adapter.latest.reason
    adapter = adapter.after(slow(1410))
    assert adapter.latest is not None
    assert adapter.latest.tunes
    for _ in range(9):
        adapter = adapter.tuned(2000, 40, gain=LEAST_GAIN / 2)
    assert adapter.rests_until == 2000 + MOST_RESTS_PER_STEP * 40
    assert adapter.tuned(2000, 40, gain=0.1).rests_per_step == RESTS_PER_STEP


def test_ranks_without_collectives_are_no_change_of_the_network() -> None:
    assert math.isnan(window(1, byte_ns=math.nan).byte_ns)
    adapter = told(*(window(10 * n, byte_ns=math.nan) for n in range(1, 4)))
    adapter = told(*(window(10 * n, step_ms=200, byte_ns=math.nan) for n in (4, 5)), adapter=adapter)
    assert adapter.latest is not None
    assert "byte" not in adapter.latest.reason


def test_where_nobody_sees_waits_no_rank_is_called_slow() -> None:
    """Servers under stock DDP: a byte takes as long as before, and why steps are longer is not known."""
    unseen = (math.nan, math.nan)
    adapter = told(*(window(10 * n, waited_ms=unseen) for n in range(1, 4)))
    adapter = told(*(window(10 * n, step_ms=200, waited_ms=unseen) for n in (4, 5)), adapter=adapter)
    assert adapter.latest is not None
    assert adapter.latest.tunes
    assert "computes" not in adapter.latest.reason


def test_the_slowest_rank_has_the_step_of_the_job() -> None:
    both = Window(7, (RankWindow(100, 1, 20, 8), RankWindow(104, 2, 30, 10)))
    assert (both.step_ms, both.uncertainty_ms, both.byte_ns) == (104, 2, 8)
    assert joined([both, both]).ranks[0].step_ms == 100
    assert joined([both, both]).uncertainty_ms == pytest.approx(2 / math.sqrt(2))


def test_what_a_rank_saw_of_its_steps() -> None:
    intervals = [Interval(10.0, False)] * 9 + [Interval(500.0, True)]
    each = Sums(2_000_000, 80, 10)
    sums = [Sums(*(number * value for value in each)) for number in range(11)]
    assert rank_window(intervals, sums) == RankWindow(10.0, 0.0, 2.0, 8.0)
    assert math.isnan(rank_window(intervals, [Sums()] * 11).byte_ns)


def test_a_step_in_which_another_rank_did_something_else_counts_for_nothing() -> None:
    intervals = [Interval(10.0, False)] * 9 + [Interval(5000.0, False)]
    sums = [Sums(number * 2_000_000, number * 80, number * 10) for number in range(10)]
    sums.append(Sums(sums[-1].waited_ns + 4_990_000_000, sums[-1].carried_ns + 9_000_000, 100))
    seen = rank_window(intervals, sums)
    assert (seen.step_ms, seen.waited_ms, seen.byte_ns) == (10.0, 2.0, 8.0)
    assert seen.computed_ms == 8.0


def test_traffic_is_summed_up() -> None:
    traffic = Traffic()
    traffic.waited(5, 25)
    traffic.carried(Collective("all_gather", 0, 400, "ring", 0, 100, 1100, 1, "decoupled"))
    assert traffic.sums == Sums(20, 1000, 400)


def test_a_tuning_that_chose_nothing_gained_nothing() -> None:
    strategy = DecoupledStrategy()
    tried = tuple(Candidate(name=name, strategy=strategy) for name in ("in force", "planned"))
    assert gained(Tuned(strategy, tried, (100.0, 80.0), 1, 40)) == pytest.approx(0.2)
    assert gained(Tuned(strategy, tried, (100.0, 80.0), 0, 40)) == 0
    assert gained(Tuned(strategy, (), (), None, 40, ended_early="why")) == 0


def with_shortlist(
    candidates: tuple[Candidate, ...],
    stock: DistributedDataParallelStrategy | None,
    monkeypatch: pytest.MonkeyPatch,
) -> CautiousProposer:
    """A proposer whose planner has found ``candidates`` for a script whose own stock DDP is ``stock``."""
    short = Shortlist(candidates=candidates)
    monkeypatch.setattr(planned_proposer, "planned", lambda _: short.model_dump_json())
    proposer = CautiousProposer()
    question = SimpleNamespace(learned=None, stock=stock, script_stock=stock)
    setting: Any = SimpleNamespace(agreement=Alone(), question=question)
    proposer.begin(setting)
    assert proposer.is_ready()
    return proposer


@pytest.mark.parametrize(
    ("predicted_ms", "tried"),
    [
        ((100.0, 99.0, 98.5), []),  # not worth a trial
        ((100.0, 99.0, 90.0, 95.0, 80.0), ["0", "4", "2"]),  # the best two
        ((100.0, None, 90.0), ["0", "2"]),
        ((None, None), []),
    ],
)
def test_only_what_is_predicted_to_be_worth_it_is_tried(
    predicted_ms: tuple[float | None, ...], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = DecoupledStrategy()
    candidates = tuple(
        Candidate(name=str(n), strategy=strategy, predicted_ms=each) for n, each in enumerate(predicted_ms)
    )
    proposer = with_shortlist(candidates, None, monkeypatch)
    found: list[str] = []
    while (candidate := proposer.propose()) is not None and len(found) < 10:
        found.append(candidate.name)
        proposer.tell(candidate, 1000.0 * len(found))  # none is close to another
    assert found == tried


def test_servers_are_tried_though_nothing_is_predicted_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    home, ours = (
        Candidate(name=name, strategy=DecoupledStrategy(), predicted_ms=100.0)
        for name in ("in force", "planned")
    )
    servers = Candidate(name="servers", strategy=ParameterServerStrategy())
    assert with_shortlist((home, ours, servers), None, monkeypatch)._left == [home, servers]
    assert with_shortlist((servers, ours), None, monkeypatch)._left == [servers, ours]


def test_stock_ddp_is_tried_with_the_scripts_own_buckets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = (DistributedDataParallelStrategy(bucket_cap_mb=cap_mb) for cap_mb in (25, 4))
    ours = Candidate(name="before", strategy=DecoupledStrategy(), predicted_ms=80.0)
    home, smaller = (Candidate(name=f"{each.bucket_cap_mb:g}", strategy=each) for each in (own, other))
    proposer = with_shortlist((home, ours, smaller), own, monkeypatch)
    assert proposer.propose() == home
    assert proposer.propose() == ours
    assert not proposer._left
