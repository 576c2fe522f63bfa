"""Members that do not ask: when others stop waiting for them, and that they come back by asking."""

from __future__ import annotations

from headway.strategies.partial_all_reduce.coordinator import ledger
from headway.strategies.partial_all_reduce.coordinator.ledger import Answer, Decision, Ledger
from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice
from headway.strategies.partial_all_reduce.coordinator.service import FACTOR, FIRST_S, LEAST_S, Absences


def test_whoever_takes_much_longer_than_usual_is_absent_once() -> None:
    absences = Absences()
    now = 0.0
    for _ in range(5):  # iterations of two seconds
        absences.note_ask(1, now)
        absences.freed(1, now + 0.5)
        now += 2.5
    absences.freed(2, now)  # has never asked
    free_since = now - 2.0
    assert not absences.absent(free_since + FACTOR * 2.0 - 0.1)
    assert absences.absent(free_since + FACTOR * 2.0 + 0.1) == [1]
    assert not absences.absent(free_since + 1000.0)
    absences.note_ask(1, 1000.0)
    absences.freed(1, 1000.0)
    absences.gone(1)
    assert not absences.absent(2000.0)


def test_iterations_longer_than_the_least_time_are_learned_from_the_first() -> None:
    absences = Absences()
    absences.joined(1, 0.0)
    assert not absences.absent(29.0)  # no time is known yet
    now = 0.0
    for _ in range(8):
        now += 30.0
        assert not absences.absent(now)
        absences.note_ask(1, now)
        absences.freed(1, now)
    assert not absences.absent(now + FACTOR * 30.0 - 1.0)
    assert absences.absent(now + FACTOR * 30.0 + 1.0) == [1]


def test_whoever_was_absent_too_early_is_so_once() -> None:
    absences = Absences()
    absences.returned(1, 0.0)  # to an iteration of which nothing is known
    assert absences.absent(LEAST_S + 1.0) == [1]
    absences.note_ask(1, 30.0)
    absences.freed(1, 30.0)
    assert not absences.absent(59.0)


def test_one_long_evaluation_does_not_count() -> None:
    absences = Absences()
    absences.joined(1, 0.0)
    now = 0.0
    for took_s in (2.0, 2.0, 2.0, 600.0, 2.0):
        now += took_s
        absences.note_ask(1, now)
        absences.freed(1, now)
        assert not absences.absent(now + FACTOR * 2.0 - 1.0)
    assert absences.absent(now + FACTOR * 2.0 + 1.0) == [1]


def test_times_of_a_member_that_returns_are_kept_and_those_of_another_in_its_place_are_not() -> None:
    absences = Absences()
    for worker in (1, 2):
        absences.joined(worker, 0.0)
        absences.note_ask(worker, 3.0)
        absences.gone(worker)
    assert not absences.absent(10_000.0)
    absences.returned(1, 10_000.0)
    absences.joined(2, 10_000.0)
    assert not absences.absent(10_000.0 + FACTOR * 3.0 - 1.0)
    assert absences.absent(10_000.0 + FACTOR * 3.0 + 1.0) == [1]
    assert not absences.absent(10_000.0 + FIRST_S - 1.0)
    assert absences.absent(10_000.0 + FIRST_S + 1.0) == [2]


def test_whoever_never_asks_is_waited_for_as_others_have_shown() -> None:
    """It may wait in a collective of the script for those that wait for it."""
    absences = Absences()
    for worker in (1, 2):
        absences.joined(worker, 0.0)
    assert not absences.absent(10_000.0), "nobody's first iteration is over"
    absences.note_ask(1, 20.0)
    assert not absences.absent(FACTOR * 20.0 - 1.0)
    assert absences.absent(FACTOR * 20.0 + 1.0) == [2]


def test_short_iterations_leave_time_and_those_before_a_restart_count_as_short() -> None:
    absences = Absences()
    absences.joined(0, 0.0)
    absences.note_ask(0, 0.0)
    absences.freed(0, 0.001)
    absences.returned(1, 0.0)
    assert not absences.absent(LEAST_S - 0.1)
    assert absences.absent(LEAST_S + 0.1) == [0, 1]


class Coordinated:
    """A ledger of three workers whose groups are of all."""

    def __init__(self) -> None:
        self.choice = GeneratorChoice("all")
        self.ledger = Ledger(self.choice.make, "job")
        self.now_ns = 0
        for worker in range(3):
            self.say(ledger.Joined(now_ns=0, worker=worker, session="0" * 32, address="a:1", host="a"))

    def say(self, event: ledger.AnyEvent) -> list[Answer]:
        return list(self.ledger.apply(event))

    def ask(self, *workers: int) -> list[Answer]:
        return [said for w in workers for said in self.say(ledger.Asked(now_ns=0, worker=w, iteration=1))]


def _members(said: list[Answer]) -> list[int]:
    (start,) = said
    assert isinstance(start, GroupStart)
    return [member.worker for member in start.members]


def test_groups_go_on_without_a_member_that_is_absent_until_it_asks() -> None:
    job = Coordinated()
    assert job.ledger.computes(2)
    assert job.ask(0, 1) == []
    assert not job.ledger.computes(1)
    began = job.say(ledger.Absented(now_ns=0, worker=2))
    assert _members(began) == [0, 1]
    (start,) = began
    job.ledger = Ledger.restored(job.choice.make, job.ledger.snapshot())  # it is known after a crash too
    for worker in (0, 1):
        ended = job.say(
            ledger.Voted(now_ns=0, worker=worker, number=start.number, key=start.key, reduced=True)
        )
    assert isinstance(ended[0], Decision)
    assert ended[0].committed
    assert _members(job.ask(0, 1)) == [0, 1]
    assert job.ask(2) == []  # there again
    (group,) = job.ledger.snapshot().groups
    for worker in (0, 1):
        job.say(
            ledger.Voted(
                now_ns=0, worker=worker, number=group.start.number, key=group.start.key, reduced=True
            )
        )
    assert _members(job.ask(0, 1)) == [0, 1, 2]
