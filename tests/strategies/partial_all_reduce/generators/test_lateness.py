"""Who is late: from when workers ask after the ends of their groups, never from how often they ask."""

from __future__ import annotations

import json

from headway.strategies.partial_all_reduce.generators.queues import Lateness, Pace

MS = 10**6


def coupled(lateness: Lateness, rounds: int, compute_ms: dict[int, int]) -> None:
    """Workers that all average with each other after every iteration."""
    now_ns = 0
    for _ in range(rounds):
        came = sorted((now_ns + own_ms * MS, worker) for worker, own_ms in compute_ms.items())
        for at_ns, worker in came:
            lateness.note_ask(worker, at_ns)
        end_ns = came[-1][0] + 10 * MS
        for worker in compute_ms:
            lateness.freed(worker, end_ns)
        now_ns = end_ns


def test_the_one_that_all_wait_for_is_late_and_nobody_else() -> None:
    lateness = Lateness(0.5)
    coupled(lateness, 6, {0: 100, 1: 105, 2: 300})
    late = {(one, two) for one in range(3) for two in range(3) if one != two and lateness.is_late(one, two)}
    assert late == {(2, 0), (2, 1)}


def test_equal_workers_are_not_late() -> None:
    lateness = Lateness(0.5)
    coupled(lateness, 6, {0: 100, 1: 105, 2: 120})
    assert not any(lateness.is_late(one, two) for one in range(3) for two in range(3))


def test_nobody_is_late_without_a_threshold_or_before_it_has_come_twice() -> None:
    for lateness, rounds in ((Lateness(0.0), 6), (Lateness(0.5), 1)):
        coupled(lateness, rounds, {0: 100, 1: 900})
        assert not lateness.is_late(1, 0)


def test_who_becomes_fast_is_late_no_more() -> None:
    lateness = Lateness(0.5)
    coupled(lateness, 6, {0: 100, 1: 400})
    assert lateness.is_late(1, 0)
    coupled(lateness, 12, {0: 100, 1: 100})
    assert not lateness.is_late(1, 0)


def test_what_it_knows_goes_through_json_and_ends_with_a_worker() -> None:
    lateness, other = Lateness(0.5), Lateness(0.5)
    coupled(lateness, 6, {0: 100, 1: 400})
    known = json.loads(json.dumps(lateness.snapshot()))
    other.take({int(worker): Pace.model_validate(pace) for worker, pace in known.items()})
    assert other.is_late(1, 0)
    other.left(1)
    assert not other.is_late(1, 0)
