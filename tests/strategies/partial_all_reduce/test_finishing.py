"""How workers' last models become one where they do not all know each other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests import limits

from headway.errors import CommunicationError
from headway.strategies.live.averaged import Flat
from headway.strategies.partial_all_reduce.coordinator.messages import Member
from headway.strategies.partial_all_reduce.finishing import Final, Finals, Finished, Finishing, PeerDirectory
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer

SECRET = b"secret"
SHORT_S = 4.0


class Worker:
    """A worker that ends with a model of its number."""

    def __init__(self, number: int) -> None:
        self.server, self.peers = PeerServer("127.0.0.1", SECRET), Peers(SECRET)
        self.member = Member(number, 0, self.server.address, "here")
        self.known = PeerDirectory(self.member, self.server)
        self.finishing = Finishing(self.member, self.known, self.server, self.peers)

    def own(self) -> Flat:
        return Flat([torch.full((4,), float(self.member.worker))])

    def finish(self, timeout_s: float = 20.0) -> tuple[float, Finished]:
        try:
            flat, finished = self.finishing.finish(self.own(), "digest", None, timeout_s)
        finally:
            self.server.close()
            self.peers.close()
        return float(flat.wholes[0][0]), finished


def acquainted(count: int) -> list[Worker]:
    """Workers that all know each other."""
    workers = [Worker(number) for number in range(count)]
    for worker in workers:
        worker.known.add(each.member for each in workers)
    return workers


@pytest.mark.parametrize(
    "known",
    [
        {0: (1, 2), 1: (0, 2), 2: (0, 1)},
        {0: (1, 2), 1: (0,), 2: (1,)},  # the last asks one that only hands on
        {0: (1, 2), 1: (2,), 2: (0, 1)},  # the second finds out that it is not the first
    ],
)
def test_all_end_with_one_model_whoever_knows_whom(known: dict[int, tuple[int, ...]]) -> None:
    workers = [Worker(number) for number in range(3)]
    for number, others in known.items():
        workers[number].known.add(workers[other].member for other in others)
    with ThreadPoolExecutor(3) as threads:
        ends = [ended.result() for ended in [threads.submit(worker.finish) for worker in workers]]
    assert [finished.workers for _, finished in ends] == [(0, 1, 2)] * 3
    assert {value for value, _ in ends} == {1.0}


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_is_late_costs_the_others_half_of_their_time_and_gets_their_mean(late: int) -> None:
    workers, limit_s = acquainted(3), limits.stretched(SHORT_S)
    others = [each for each in range(3) if each != late]
    with ThreadPoolExecutor(3) as threads:
        ending = [threads.submit(workers[each].finish, limit_s) for each in others]
        ends = [ending[-1].result()]  # the other of them collects, and waits for who is late
        ends.append(threads.submit(workers[late].finish, limit_s).result())
        ends.append(ending[0].result())
    assert {value for value, _ in ends} == {sum(others) / 2}
    assert {finished for _, finished in ends} == {Finished(tuple(others), others[0])}


def test_who_comes_when_the_others_are_gone_keeps_its_own_and_is_told() -> None:
    workers, limit_s = acquainted(3), limits.stretched(SHORT_S)
    with ThreadPoolExecutor(2) as threads:
        ends = [each.result() for each in [threads.submit(worker.finish, limit_s) for worker in workers[1:]]]
    assert [value for value, _ in ends] == [1.5, 1.5]
    with pytest.raises(CommunicationError, match="worker 0: the others finished without this worker"):
        workers[0].finish()


def test_who_would_collect_takes_what_is_agreed_already() -> None:
    first, second = acquainted(2)
    agreed = Final(second.own(), "digest", (1,), agreed=True)
    finals = Finals(second.member, second.known, second.server, second.peers)
    finals.end_with(agreed)
    finals.agree(agreed)
    assert first.finish() == (1.0, Finished((1,), 1))
    second.server.close()


def test_who_did_not_answer_and_then_does_is_not_ended_without() -> None:
    workers = acquainted(3)
    finals, failures = workers[1].finishing._finals, 2
    ask = finals.ask

    def stopped_at_first(member: Member, *arguments: Any, **options: Any) -> Final:
        nonlocal failures
        if member.worker == 0 and failures:
            failures -= 1
            raise TimeoutError("stopped")
        return ask(member, *arguments, **options)

    finals.ask = stopped_at_first  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as threads:
        ending = [threads.submit(workers[1].finish)]
        while failures:
            time.sleep(0.01)
        ending.append(threads.submit(workers[0].finish))
        time.sleep(1.0)  # both collect by now, and wait for the last one
        ending.append(threads.submit(workers[2].finish))
        ends = [ended.result() for ended in ending]
    assert {finished.workers for _, finished in ends} == {(0, 1, 2)}
    assert {value for value, _ in ends} == {1.0}


def test_where_a_worker_is_comes_from_its_last_incarnation_or_from_itself() -> None:
    (worker,) = acquainted(1)
    old, new = (Member(3, incarnation, f"there:{incarnation}", "there") for incarnation in (1, 2))
    worker.known.add([old])
    worker.known.add([new])
    worker.known.add([old])
    assert worker.known.peers == [new]
    worker.known.add([old], at_first_hand=True)  # a coordinator may count anew
    assert worker.known.peers == [old]
    worker.server.close()
    worker.peers.close()


def test_nothing_is_agreed_where_something_comes_first() -> None:
    (worker,) = acquainted(1)
    finals = Finals(worker.member, worker.known, worker.server, worker.peers)
    final = Final(worker.own(), "digest", (0,), agreed=True)
    assert not finals.agree(final, unless=lambda: True)
    assert finals.agree(final, unless=lambda: False)
    worker.server.close()


def test_a_worker_that_says_hello_hears_of_those_that_the_others_know() -> None:
    workers = [Worker(number) for number in range(3)]
    workers[0].known.add([workers[1].member])
    workers[2].known.add([workers[0].member])
    workers[2].known.say_hello(workers[2].peers)
    assert [each.worker for each in workers[2].known.peers] == [0, 1]
    assert [each.worker for each in workers[1].known.peers] == [2]
    for worker in workers:
        worker.server.close()
        worker.peers.close()
