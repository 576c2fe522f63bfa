"""The coordinator between connections and ledger, with a clock that is handed in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests import limits
from tests.strategies.partial_all_reduce.coordinator.simple_generators import All

from headway.strategies.partial_all_reduce.coordinator import messages
from headway.strategies.partial_all_reduce.coordinator import service as service_module
from headway.strategies.partial_all_reduce.coordinator.ledger import Ledger
from headway.strategies.partial_all_reduce.coordinator.observer import Observer
from headway.strategies.partial_all_reduce.coordinator.service import LEAST_S, Leases, Service, Stream

LEASE_S = 3600.0
LOOK_S = 0.01
LONG_S = 30.0


class Clock:
    """Goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, monotonic_ns=lambda: int(self.now_s * 1e9))
        monkeypatch.setattr(service_module, "time", clock)
        monkeypatch.setattr(Leases, "look_s", LOOK_S)


def welcomed(service: Service, worker: int, incarnation: int = 0) -> Stream:
    """A connection of a worker, of the same session whenever it comes."""
    member = messages.MemberModel(worker=worker, incarnation=incarnation, address=f"{worker}:1", host="host")
    hello = messages.Hello(protocol=messages.PROTOCOL, session=f"{worker:032x}", member=member)
    stream = Stream()
    service.welcome(hello, stream)
    return stream


async def started(stream: Stream) -> list[int]:
    """The members of the group that the worker is told of next."""
    while True:
        message = await asyncio.wait_for(stream.next(), limits.stretched(LONG_S))
        if isinstance(message, messages.Start):
            return [member.worker for member in message.members]


async def _served(clock: Clock, *, lease_ends: bool) -> list[int]:
    """The group of worker 0 after worker 1 lost its connection when it had asked, and goes on alone."""
    service = Service(Ledger(lambda _: All(), "job"), None, LEASE_S, 8, Observer(), "all")
    service.begin()
    try:
        streams = [welcomed(service, worker) for worker in (0, 1)]
        clock.now_s += 0.1
        service.heard(streams[1], messages.Ask(iteration=0))
        service.lost(streams[1])
        if lease_ends:
            service._leave(1, "lease")
        welcomed(service, 1, incarnation=1)
        service.heard(streams[0], messages.Ask(iteration=0))
        clock.now_s += LEAST_S + 1.0
        return await started(streams[0])
    finally:
        service.end()


@pytest.mark.parametrize("lease_ends", [False, True])
def test_whoever_lost_its_connection_and_waits_elsewhere_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, *, lease_ends: bool
) -> None:
    assert asyncio.run(_served(Clock(monkeypatch), lease_ends=lease_ends)) == [0]
