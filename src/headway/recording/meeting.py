"""What the ranks of a recording tell each other through the job's store: where clocks and connections are."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from headway import torch_private
from headway.clocks import comparing
from headway.errors import UserError
from headway.recording.connections import ConnectionWatch, Endpoint, peers_of
from headway.rpc import interface, trusted
from headway.trace.format import ClockFit

CLOCK_KEY = "headway/clock"
LINKS_KEY = "headway/links"
BEGIN_PATIENCE = timedelta(seconds=60)
LOOK_S = 0.5  # how often it is asked how long to wait on

T = TypeVar("T")


class ClockComparison:
    """Round trips between a rank's clock and rank 0's, before a recording and after it."""

    def __init__(self, number: int) -> None:
        self._key = f"{CLOCK_KEY}/{number}"
        self._server: comparing.ClockServer | None = None
        self._address: tuple[str, int] | None = None
        self._secret = b""
        self._before: list[comparing.RoundTrip] = []

    def begin(self) -> None:
        """Open rank 0's port, or find it and make the first round trips.

        Where there can be none, clocks are not compared: what ranks do together tells how far they are apart.
        """
        store = torch_private.default_store()
        found: dict[str, Any] = {}
        if dist.get_rank() == 0:
            self._secret = trusted.new_secret()
            with contextlib.suppress(OSError, UserError):
                address = interface.job_address()
                self._server = self._serving(address)
                found = {"address": address, "port": self._server.port, "secret": self._secret.hex()}
            store.set(self._key, json.dumps(found))
            return
        with contextlib.suppress(RuntimeError):  # rank 0 does not record, or is gone
            store.wait([self._key], BEGIN_PATIENCE)
            found = json.loads(store.get(self._key))
        if not found:
            return
        self._secret = bytes.fromhex(found["secret"])
        for host in _hosts(found["address"]):
            self._address = (host, found["port"])
            self._before = comparing.measure_round_trips(self._address, self._secret, last=False)
            if self._before:
                return

    def _serving(self, address: str) -> comparing.ClockServer:
        """Rank 0's server: on its own address alone, unless that may be none that others reach."""
        ranks = dist.get_world_size()
        if not interface.is_loopback(address) or interface.is_on_one_host():
            with contextlib.suppress(OSError):  # others know this machine by an address that is translated
                return comparing.ClockServer(address, self._secret, ranks)
        return comparing.ClockServer(interface.EVERY_ADDRESS, self._secret, ranks)

    def end(self, rank: int, world_size: int, patience_s: Callable[[], float]) -> ClockFit:
        """Make the last round trips, which rank 0 waits for; how this rank's clock is brought onto rank 0's.

        ``patience_s`` says how long to wait from now on.
        """
        if rank == 0:
            if self._server is not None:
                while not self._server.wait_for_last_rounds(world_size - 1, min(LOOK_S, patience_s())):
                    if not patience_s():
                        break
            return ClockFit()
        if self._address is None:
            return comparing.fit_clock((), ())
        after = comparing.measure_round_trips(self._address, self._secret, last=True)
        return comparing.fit_clock(self._before, after)

    def close(self) -> None:
        """Close rank 0's port."""
        if self._server is not None:
            self._server.close()


def _hosts(published: str) -> list[str]:
    """Where rank 0 may be: it usually lives where everybody met, and may take its loopback for its address."""
    master = os.environ.get("MASTER_ADDR", interface.LOOPBACK)
    order = (master, published) if interface.is_loopback(published) else (published, master)
    return list(dict.fromkeys(order))


def publish_connections(number: int, connections: ConnectionWatch, patience_s: Callable[[], float]) -> None:
    """Tell others of this rank's connections, first of all and in every case: they wait for it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):  # the store went with the rank that kept it
            store, key, pairs = (
                torch_private.default_store(),
                _links_key(number, dist.get_rank()),
                connections.pairs(),
            )
            _within(patience_s, lambda: store.set(key, pairs))


def connection_peers(
    number: int, connections: ConnectionWatch, rank: int, world_size: int, patience_s: Callable[[], float]
) -> dict[tuple[Endpoint, Endpoint], int]:
    """Which rank is at the other end of each connection; nothing where others do not say in time."""
    if world_size == 1 or not dist.is_initialized():
        return {}
    store = torch_private.default_store()
    keys = [_links_key(number, other) for other in range(world_size)]
    try:
        limit = timedelta(seconds=patience_s() + LOOK_S)
        _within(patience_s, lambda: store.wait(keys, limit))
        published = _within(
            patience_s,
            lambda: {other: store.get(key).decode() for other, key in enumerate(keys) if other != rank},
        )
    except RuntimeError:  # a rank that is gone publishes nothing
        return {}
    return peers_of(connections.uses, published)


def _within(patience_s: Callable[[], float], ask: Callable[[], T]) -> T:
    """What ``ask`` has of the store. Raises RuntimeError where patience is over before, or the store is gone.

    A store whose keeper is frozen answers nothing, and heeds no limit of its own: a thread asks it.
    """
    answers: list[Callable[[], T]] = []
    answered = threading.Event()

    def asks() -> None:
        try:
            answer = ask()
            answers.append(lambda: answer)
        except Exception as failure:
            answers.append(functools.partial(_raise, failure))
        answered.set()

    threading.Thread(target=asks, name="headway-store", daemon=True).start()
    while not answered.wait(LOOK_S):
        if not patience_s():
            raise RuntimeError("the store does not answer")
    return answers[0]()


def _raise(failure: Exception) -> Any:
    raise failure


def _links_key(number: int, rank: int) -> str:
    return f"{LINKS_KEY}/{number}/{rank}"
