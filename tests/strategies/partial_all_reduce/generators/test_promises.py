"""What generators promise, for more workers: any events, restored states, mixing, and who is passed over."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.strategies.partial_all_reduce.generators.watched import HOSTS, Watched, restored, watched

from headway.errors import PlanError
from headway.strategies.partial_all_reduce.generators import rules
from headway.strategies.partial_all_reduce.generators.generator import Grant
from headway.strategies.partial_all_reduce.generators.queues import divided

CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("all", {}),
    ("pairs", {}),
    ("pairs", {"neighbours": "any"}),
    ("random", {"group_size": 3}),
    ("group-buffer", {"group_size": 3}),
    ("group-buffer", {"group_size": 3, "slowdown_threshold": 3}),
    ("global-division", {"group_size": 3}),
    ("global-division", {"group_size": 3, "slowdown_threshold": 3}),
    ("inter-intra", {"group_size": 3}),
    ("inter-intra", {"group_size": 2, "slowdown_threshold": 3}),
    ("inter-intra", {"group_size": 3, "lateness_threshold": 0.5}),
    ("global-division", {"group_size": 3, "lateness_threshold": 1.0}),
    ("first-come", {"group_size": 3}),
    ("first-come", {"group_size": 3, "deadline_ms": 0.5, "mixing_window": 2}),
]
EACH = pytest.mark.parametrize(("name", "options"), CASES)


@EACH
@settings(deadline=None, max_examples=examples(25))
@given(data=st.data())
def test_any_events_of_many_workers(name: str, options: Mapping[str, Any], data: st.DataObject) -> None:
    """And one that is restored from its state after every event answers as one that never was."""
    workers = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 5))
    world, twin = (watched(name, options, seed, workers) for _ in range(2))
    for _ in range(data.draw(st.integers(0, 60))):
        both = (world, twin)
        kinds = ["ask"] * 4 * bool(world.free) + ["ended"] * 2 * bool(world.running)
        kinds += ["leave"] * bool(world.present) + ["join"] * (len(world.present) < workers)
        kinds += ["wake"] * (world.generator.wake_ns is not None)
        kind = data.draw(st.sampled_from(kinds))
        passed_ns = data.draw(st.integers(0, 10**6))
        if kind == "wake":
            answers = [each.wake() for each in both]
        else:
            about = data.draw(
                st.sampled_from(
                    {
                        "ask": world.free,
                        "ended": sorted(world.running),
                        "leave": sorted(world.present),
                        "join": sorted(set(range(workers)) - world.present),
                    }[kind]
                )
            )
            answers = []
            for each in both:
                each.now_ns += passed_ns
                answers.append(getattr(each, kind)(about))
        assert answers[0] == answers[1]
        assert world.generator.state() == twin.generator.state()
        assert len(getattr(world.generator, "queue", ())) <= 3 * workers
        twin.generator = restored(twin.generator, name, options)
    world.fair_rounds(2 * workers + 2)


def trained(world: Watched, step_ns: Mapping[int, int], least_asks: int) -> list[Grant]:
    """Have workers compute ``step_ns`` a step, and groups take no time, until each has asked so many times."""
    arrivals = [(step_ns[worker], worker) for worker in world.free]
    heapq.heapify(arrivals)
    asked: Counter[int] = Counter()
    granted: list[Grant] = []
    while min((asked[worker] for worker in step_ns), default=0) < least_asks:
        wake_ns = world.generator.wake_ns
        if arrivals and (wake_ns is None or arrivals[0][0] <= wake_ns):
            world.now_ns, worker = heapq.heappop(arrivals)
            asked[worker] += 1
            begun = list(world.ask(worker))
        else:
            begun = list(world.wake())
        while begun:
            grant = begun.pop(0)
            granted.append(grant)
            if len(grant.members) > 1:
                begun += world.ended(grant.number)
            for member in grant.members:
                heapq.heappush(arrivals, (world.now_ns + step_ns[member], member))
    return granted


def mixes(granted: list[Grant], workers: int) -> bool:
    """Whether what every worker knew at first has reached every other."""
    known = {worker: {worker} for worker in range(workers)}
    for grant in granted:
        union = set().union(*(known[member] for member in grant.members))
        known.update(dict.fromkeys(grant.members, union))
    return all(len(each) == workers for each in known.values())


@EACH
@settings(deadline=None, max_examples=examples(15))
@given(
    workers=st.integers(2, 9),
    seed=st.integers(0, 1000),
    slow=st.integers(1, 6),
    jitter=st.integers(0, 20),
)
@example(workers=4, seed=3, slow=2, jitter=0)  # where divisions would find the same two pairs for ever
def test_everybody_mixes_with_everybody(
    name: str, options: Mapping[str, Any], workers: int, seed: int, slow: int, jitter: int
) -> None:
    drawn = random.Random(seed)
    step_ns = {worker: 10**6 + drawn.randint(0, jitter) * 10**4 for worker in range(workers)}
    step_ns[0] *= slow
    world = watched(name, options, seed, workers)
    assert mixes(trained(world, step_ns, 4 * workers + 16), workers)


def test_two_pairs_that_would_never_meet_are_brought_together() -> None:
    """Update isolation: 0 and 1 always come together, and so do 2 and 3, at other times."""
    step_ns = dict.fromkeys(range(4), 10**6)
    for window, meet in ((4, True), (1000, False)):
        options = {"group_size": 2, "deadline_ms": 0.01, "mixing_window": window}
        world = watched("first-come", options, workers=4)
        trained(world, step_ns, 1)
        later = trained_from(world, {0: 0, 1: 0, 2: 500_000, 3: 500_000}, step_ns)
        assert mixes(later, 4) == meet


def trained_from(world: Watched, offset_ns: Mapping[int, int], step_ns: Mapping[int, int]) -> list[Grant]:
    """Twenty rounds in which workers come at their offsets."""
    granted: list[Grant] = []
    begin_ns = world.now_ns
    for round_ in range(1, 21):
        for worker, offset in sorted(offset_ns.items(), key=lambda pair: pair[1]):
            at_ns = begin_ns + round_ * step_ns[worker] + offset
            begun: list[Grant] = []
            while (wake_ns := world.generator.wake_ns) is not None and wake_ns <= at_ns:
                begun += world.wake()
            world.now_ns = at_ns
            if worker in world.free:
                begun += world.ask(worker)
            for grant in begun:
                if len(grant.members) > 1:
                    world.ended(grant.number)
            granted += begun
    return granted


@pytest.mark.parametrize("name", ["group-buffer", "global-division"])
def test_who_falls_behind_is_left_out_until_it_asks(name: str) -> None:
    hosts = 4
    for threshold, patient in ((3, False), (0, True)):
        world = watched(name, {"group_size": 2, "slowdown_threshold": threshold}, 1, hosts)
        step_ns = dict.fromkeys(range(hosts), 10**6) | {3: 50 * 10**6}
        granted = trained(world, step_ns, 2)
        of_fast = sum(len(grant.members) for grant in granted)
        assert (of_fast < 100) == patient, f"without the filter all wait for it again and again: {of_fast}"


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_host_is_not_held_up_by_its_slow_worker(threshold: float) -> None:
    """Those of its host ask as rarely as it does while they average with it: what tells them apart is who is late."""
    world = watched("inter-intra", {"group_size": 2, "lateness_threshold": threshold}, workers=8)
    slowly, step_ns = 50 * 10**6, 10**6
    granted = trained(world, dict.fromkeys(range(8), step_ns) | {3: slowly}, 12)
    of_its_host = sum(2 in grant.members for grant in granted)
    if threshold:
        assert of_its_host > 0.55 * 12 * slowly / step_ns
        assert any(3 in grant.members for grant in granted[len(granted) // 2 :]), (
            "nobody is left out for good"
        )
    else:
        assert of_its_host < 50


def test_no_straggler_is_waited_for_by_those_who_come_first() -> None:
    world = watched("first-come", {"group_size": 3}, workers=5)
    step_ns = dict.fromkeys(range(4), 10**6) | {4: 20 * 10**6}
    granted = trained(world, step_ns, 5)
    fast = sum(len(grant.members) for grant in granted) - 5
    assert fast > 4 * 5 * 20 * 0.5
    assert sum(len(grant.members) > 1 for grant in granted) > 0.9 * len(granted)


def test_the_deadline_follows_the_times_between_arrivals() -> None:
    world = watched("first-come", {"group_size": 3, "patience": 2.0, "most_ms": 500}, workers=6)
    generator: Any = world.generator
    assert generator.deadline_ns == 500 * 10**6
    trained(world, dict.fromkeys(range(6), 6 * 10**6), 30)
    steady_ns = generator.deadline_ns
    assert 10**6 <= steady_ns <= 8 * 10**6
    trained(world, dict.fromkeys(range(6), 60 * 10**6), 30)
    assert generator.deadline_ns > 4 * steady_ns


@settings(deadline=None)
@given(count=st.integers(1, 50), size=st.integers(2, 12))
def test_divisions_have_groups_of_nearly_equal_size(count: int, size: int) -> None:
    groups = divided(range(count), size)
    assert [each for group in groups for each in group] == list(range(count))
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= size + 1
    assert min(sizes) >= min(2, count)


def test_what_no_worker_may_do() -> None:
    for name in rules.names():
        world = watched(name, {}, workers=2)
        generator = world.generator
        with pytest.raises(ValueError, match="joined already"):
            generator.join(1, 0)
        with pytest.raises(ValueError, match="not joined"):
            generator.ask(7, 0)
        with pytest.raises(ValueError, match="no group 5"):
            generator.ended(5, 0)
        assert list(generator.leave(7, 0)) == []
        world.ask(0)
        with pytest.raises(ValueError, match="not free"):
            generator.ask(0, 0)
        while not world.running:
            world.ask(world.free[0])
        with pytest.raises(ValueError, match="not free"):
            generator.ask(0, 0)


def test_random_groups_that_wait_share_nobody() -> None:
    world = watched("random", {"group_size": 3, "mixing_window": 1000}, workers=9)
    drawn = random.Random(0)
    for _ in range(300):
        if world.free and (drawn.random() < 0.7 or not world.running):
            world.ask(drawn.choice(world.free))
        else:
            world.ended(drawn.choice(list(world.running)))
        queue: Any = world.generator.state()["queue"]
        members = [worker for group in queue for worker in group]
        assert len(set(members)) == len(members)


def test_who_joins_again_waits_until_its_former_group_has_ended() -> None:
    for name in rules.names():
        world = watched(name, {"group_size": 2} if name not in ("all", "pairs") else {}, workers=2)
        world.ask(0)
        world.ask(1)
        ((number, _),) = world.running.items()
        world.leave(0)
        world.join(0)
        assert not world.ask(0)
        assert not world.generator.wake_ns
        granted = [*world.ended(number), *(world.ask(1) if 1 in world.free else ())]
        assert [grant.members for grant in granted] in ([(0, 1)], [(0,)])


def test_states_that_are_none() -> None:
    world = watched("global-division", {"group_size": 2}, workers=4)
    world.ask(0)
    state = json.loads(json.dumps(world.generator.state()))
    changes: tuple[dict[str, Any], ...] = (
        {"generator": "random"},
        {"options": {"group_size": 3, "slowdown_threshold": 0}},
        {"queue": [[0, 9]]},
        {"queue": []},
        {"waiting": [[0, 0], [0, 1]]},
        {"waiting": [[7, 0]]},
        {"asks": {}},
        {"next_number": -1},
        {"running": [{"number": 0, "members": [0, 1]}]},
        {"more": 1},
    )
    for change in changes:
        fresh = rules.generator_of("global-division", {"group_size": 2}, HOSTS, 0)
        with pytest.raises(ValueError, match=r"state|validation error"):
            fresh.restore({**state, **change})


def test_options_are_validated() -> None:
    for name, options, said in (
        ("circle", {}, "unknown group generator.*first-come"),
        ("random", {"group_size": 1}, "group_size"),
        ("all", {"group_size": 4}, "unknown key group_size"),
        ("first-come", {"least_ms": 5, "most_ms": 1}, "least_ms is longer"),
        ("pairs", {"neighbours": "few"}, "neighbours"),
    ):
        with pytest.raises(PlanError, match=said):
            rules.generator_of(name, options, {}, 0)
