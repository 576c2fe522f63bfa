"""A worker's client with a real server on the same machine: groups, votes, outages, and places that are taken."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests import limits
from tests.strategies.partial_all_reduce.coordinator.simple_generators import All
from tests.strategies.partial_all_reduce.server_thread import ServerThread

from headway.errors import CommunicationError, UnsupportedError, UserError
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient, Link
from headway.strategies.partial_all_reduce.coordinator.messages import (
    Coordinator,
    GroupStart,
    Member,
    Welcome,
)
from headway.strategies.partial_all_reduce.coordinator.options import ServiceOptions

T = TypeVar("T")
LONG_S = 30.0


class Job:
    """A coordinator that can be ended and started again, and clients of it."""

    def __init__(self, journal: Path | None, lease_s: float = 20.0) -> None:
        self._options = ServiceOptions(lease_s=lease_s, journal=journal)
        self._clients: list[CoordinatorClient] = []
        self.server = self._started("127.0.0.1:0")
        self.address = self.server.address

    def _started(self, listen: str) -> ServerThread:
        return ServerThread(lambda _: All(), "all", self._options, listen)

    def restart(self) -> None:
        self.server = self._started(self.address)

    def worker(self, number: int) -> CoordinatorClient:
        client = CoordinatorClient(self.address)
        self._clients.append(client)
        client.join(Member(number, 0, f"{number}:1", "host"), long_s())
        return client

    def close(self) -> None:
        for client in self._clients:
            client.leave()
        self.server.close()


def long_s() -> float:
    return limits.stretched(LONG_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path / "journal")
    yield one
    one.close()


def together(*calls: Callable[[], T]) -> list[T]:
    """What calls return that are made at the same time."""
    found: dict[int, T] = {}

    def call(index: int, one: Callable[[], T]) -> None:
        found[index] = one()

    threads = [threading.Thread(target=call, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(calls))]


def granted(*clients: CoordinatorClient) -> GroupStart:
    """Let all ask; returns the group that they are granted."""
    for client in clients:
        client.ask(0)
    starts = [client.granted(long_s()) for client in clients]
    assert starts[0] is not None
    assert all(start == starts[0] for start in starts)
    return starts[0]


def wait_until(what: Callable[[], bool]) -> None:
    limit = limits.Limit(LONG_S)
    pause = threading.Event()
    while not what():
        assert not limit.over(), "it does not happen"
        pause.wait(0.01)


def test_it_is_a_coordinator() -> None:
    client: Coordinator = CoordinatorClient("127.0.0.1:1")
    assert not client.is_reachable


def test_all_members_hold_the_mean_or_none_takes_it(job: Job) -> None:
    one, other = job.worker(0), job.worker(1)
    start = granted(one, other)
    assert [member.worker for member in start.members] == [0, 1]
    votes = together(
        lambda: one.vote(start.number, True, long_s()), lambda: other.vote(start.number, True, long_s())
    )
    assert votes == [True, True]
    start = granted(one, other)
    assert not other.vote(start.number, False, long_s())
    assert not one.vote(start.number, True, long_s()), "known without waiting"
    assert one.outcome(start.number, 0) is False
    assert job.worker(2).outcome(start.number, long_s()) is False
    assert one.outcome(12345, long_s()) is None


def test_who_joins_sees_who_is_there(job: Job) -> None:
    job.worker(3)
    client = CoordinatorClient(job.address)
    assert client.join(Member(1, 0, "1:1", "host"), long_s()) == (Member(3, 1, "3:1", "host"),)
    client.leave()
    assert client.join(Member(1, 0, "1:1", "host"), long_s()) == (Member(3, 1, "3:1", "host"),)
    assert client.incarnation == 2
    client.leave()


def test_who_leaves_is_not_waited_for(job: Job) -> None:
    one, other = job.worker(0), job.worker(1)
    one.ask(0)
    assert one.granted(0.01) is None
    other.leave()
    start = one.granted(long_s())
    assert start is not None
    assert start.members == (Member(0, 1, "0:1", "host"),)


def test_who_leaves_before_it_has_voted_aborts(job: Job) -> None:
    one, other = job.worker(0), job.worker(1)
    start = granted(one, other)
    other.leave()
    assert not one.vote(start.number, True, long_s())


def test_who_asks_again_has_given_up_its_group(job: Job) -> None:
    one, other = job.worker(0), job.worker(1)
    start = granted(one, other)
    one.ask(1)
    assert not other.vote(start.number, True, long_s())
    other.ask(1)
    assert one.granted(long_s()) == other.granted(long_s())


def test_a_worker_outlives_an_outage(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    one, other = job.worker(0), job.worker(1)
    one.ask(0)
    with caplog.at_level(logging.WARNING):
        job.server.close()
        assert one.granted(long_s()) is None, "what was asked for counts no more"
    assert "trains alone" in caplog.text
    assert not one.is_reachable
    one.ask(1)
    assert one.granted(long_s()) is None, "and nobody waits meanwhile"
    assert not one.vote(7, True, long_s())
    job.restart()
    wait_until(lambda: one.is_reachable and other.is_reachable)
    assert len(granted(one, other).members) == 2
    assert (one.incarnation, one.rejoined) == (1, 0)


def test_a_worker_that_writes_before_it_reads_that_its_stream_has_ended_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(Link):
        deaf = True

        async def _read(self, call: Any) -> None:
            if Deaf.deaf:
                await asyncio.Event().wait()
            await super()._read(call)

    monkeypatch.setattr("headway.strategies.partial_all_reduce.coordinator.client.Link", Deaf)
    job = Job(tmp_path / "journal")
    client = job.worker(0)
    client.ask(0)
    job.server.close()
    Deaf.deaf = False
    job.restart()
    client.ask(1)  # which is written to the stream that has ended
    assert client.granted(long_s()) is None
    wait_until(lambda: client.is_reachable)
    assert len(granted(client).members) == 1
    job.close()


def test_a_link_that_fails_tells_who_waits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    async def fails(*_: Any) -> None:
        while not asked.is_set():
            await asyncio.sleep(0.01)
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Link, "_read", fails)
    client = job.worker(0)
    client.ask(0)
    asked.set()
    assert client.granted(long_s()) is None
    assert not client.is_reachable


def test_who_leaves_in_the_middle_of_a_vote_does_not_wait_for_it(job: Job) -> None:
    one, other = job.worker(0), job.worker(1)
    start = granted(one, other)

    def leaves() -> bool:
        wait_until(lambda: start.number in one._state.votes)
        one.leave()
        return True

    begun_s = time.monotonic()
    assert together(lambda: one.vote(start.number, True, 1000.0), leaves) == [False, True]
    assert time.monotonic() - begun_s < 500
    assert one.granted(1000.0) is None


def test_who_has_left_does_not_come_back(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one, stops = job.worker(0), CoordinatorClient._stop

    def late(client: CoordinatorClient) -> None:
        time.sleep(0.5)  # longer than a link rests before it connects again
        stops(client)

    monkeypatch.setattr(CoordinatorClient, "_stop", late)
    one.leave()
    monkeypatch.undo()
    assert (one.incarnation, one.rejoined) == (1, 0)
    client = CoordinatorClient(job.address)
    assert client.join(Member(1, 0, "1:1", "host"), long_s()) == ()
    client.leave()


def test_a_new_incarnation_is_noticed_though_its_first_welcome_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Told:
        def __init__(self, *_: Any, welcomed: Callable[[Welcome], None], **__: Any) -> None:
            self._welcomed = welcomed

        def say(self, _: Any) -> None:
            pass

        async def run(self) -> None:
            for incarnation in (1, 3):  # told of in vain: that 2 was no resumption
                self._welcomed(
                    Welcome(incarnation=incarnation, resumed=True, lease_s=1, members=[], running=None)
                )

    monkeypatch.setattr("headway.strategies.partial_all_reduce.coordinator.client.Link", Told)
    monkeypatch.setattr("headway.strategies.partial_all_reduce.coordinator.client.LEAVE_S", 0.1)
    client = CoordinatorClient("127.0.0.1:1")
    client.join(Member(0, 0, "0:1", "0"), long_s())
    wait_until(lambda: client.incarnation == 3)
    assert client.rejoined == 1
    client.leave()


def test_what_is_missing_for_secrets_is_said_where_a_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: bytes) -> None:
        raise UserError("the coordinator needs cryptography")

    monkeypatch.setattr(
        "headway.strategies.partial_all_reduce.coordinator.security.client_credentials", missing
    )
    client = CoordinatorClient("127.0.0.1:1", secret=b"s" * 32)
    with pytest.raises(UserError, match="needs cryptography"):
        client.join(Member(0, 0, "0:1", "0"), long_s())


def test_a_vote_is_repeated_after_an_outage(job: Job) -> None:
    one, other = job.worker(0), job.worker(1)
    start = granted(one, other)
    assert not one.vote(start.number, True, 0.0), "nothing is decided yet"
    assert one.outcome(start.number, 0) is None
    job.server.close()

    def back() -> bool:
        job.restart()
        return True

    votes = together(
        lambda: one.vote(start.number, True, long_s()),
        lambda: other.vote(start.number, True, long_s()),
        back,
    )
    assert votes == [True, True, True]


def test_a_coordinator_that_has_forgotten_all_has_workers_join_again(tmp_path: Path) -> None:
    job = Job(None)
    one, other = job.worker(0), job.worker(1)
    start = granted(one, other)
    job.server.close()
    job.restart()
    wait_until(lambda: bool(one.rejoined and other.rejoined and one.is_reachable and other.is_reachable))
    assert not one.vote(start.number, True, long_s()), "nobody knows this group"
    again = granted(one, other)
    assert again.number == start.number
    assert again.key != start.key
    votes = together(
        lambda: one.vote(again.number, True, long_s()), lambda: other.vote(again.number, True, long_s())
    )
    assert votes == [True, True]
    job.close()


def test_another_process_takes_a_place_for_good(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    first = job.worker(0)
    second = job.worker(0)
    assert second.incarnation == 2
    wait_until(lambda: not first.is_reachable)
    first.ask(0)
    assert first.granted(long_s()) is None
    assert len(granted(second).members) == 1
    assert not first.is_reachable
    assert "another process has taken the worker's place" in caplog.text


def test_nobody_there_is_a_communication_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.strategies.partial_all_reduce.coordinator.client.NOTICE_S", 0.2)
    client = CoordinatorClient("127.0.0.1:1")
    with pytest.raises(CommunicationError, match=r"worker 0 cannot join .* at its coordinator 127.0.0.1:1"):
        client.join(Member(0, 0, "0:1", "host"), 0.4)
    assert "worker 0 cannot reach its coordinator 127.0.0.1:1 (" in caplog.text
    client.leave()


def test_addresses_that_others_reach_need_a_secret() -> None:
    client = CoordinatorClient("10.0.0.1:80")
    with pytest.raises(UserError, match="needs a secret"):
        client.join(Member(0, 0, "0:1", "host"), 1)


def test_forked_processes_do_not_disturb_and_do_not_join(job: Job) -> None:
    client = job.worker(0)
    for _ in range(3):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                CoordinatorClient(job.address).join(Member(1, 0, "1:1", "host"), 5)
            except UnsupportedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(granted(client).members) == 1
    assert client.rejoined == 0
