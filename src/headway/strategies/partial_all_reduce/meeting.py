"""How ranks find each other and their coordinator, exchange host names, and join."""

from __future__ import annotations

import atexit
import hmac
import json
import socket
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, UnsupportedError, UserError
from headway.rpc import interface
from headway.rpc.trusted import new_secret
from headway.strategies.partial_all_reduce.coordinator import transport
from headway.strategies.partial_all_reduce.coordinator.child import (
    ADDRESS_VARIABLE,
    SECRET_VARIABLE,
    CoordinatorProcess,
    from_environment,
)
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce


@contextmanager
def coordinator(strategy: PartialAllReduceStrategy) -> Iterator[Mapping[str, str]]:
    """Run a coordinator while the block runs; yields the environment variables for workers on this host.

    Yields nothing if the environment already names a coordinator. Raises LaunchError if it does not start.
    """
    if from_environment() is not None:
        yield {}
        return
    process = CoordinatorProcess(choice_of(strategy))
    try:
        yield process.environment()
    finally:
        process.close()


def choice_of(strategy: PartialAllReduceStrategy) -> GeneratorChoice:
    """Return the group generator of ``strategy``, whose groups are not static."""
    return GeneratorChoice(strategy.groups, strategy.generator_options, strategy.seed)


MAX_REASON = 4096
_runs = count(1)
_started: dict[tuple[str, str], CoordinatorProcess] = {}


@dataclass(frozen=True, slots=True)
class Coordination:
    """Address and ``secret`` of the coordinator, the secret between ranks, and this rank's address ``host``."""

    address: str
    secret: bytes | None
    peers_secret: bytes
    host: str


class Meeting:
    """Lets the ranks of the default process group agree on a coordinator when they wrap a model.

    It uses the job's store, and only at that time. The coordinator is the one in rank 0's environment, set by a launcher
    or user; without one, rank 0 starts one, which ends with rank 0. Every rank creates its meetings in the same order.
    Waiting for another rank raises CommunicationError after ``timeout_s``.
    """

    def __init__(self, timeout_s: float) -> None:
        self._store = torch_private.default_store()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self._run = f"headway/averaged/{next(_runs)}"

    def coordination(self, choice: GeneratorChoice) -> Coordination:
        """Agree on the coordinator; rank 0 starts one with ``choice`` if its environment names none.

        A secret from the environment is never sent through the store. Raises UserError if no coordinator starts, if
        ranks name different ones or lack its secret, and if its address is unreachable from other hosts.
        """
        place_here = {"host": socket.gethostname(), "address": interface.job_address()}
        places = [_read(answer) for answer in self._exchanged("place", json.dumps(place_here))]
        addresses = [str(place.get("address")) for place in places]
        together = len({(place.get("host"), place.get("address")) for place in places}) == 1
        host = interface.reachable_address(addresses, self._rank)
        if self._rank == 0:
            try:
                self._put("coordinator", json.dumps(_offered(choice, host, together=together)))
            except BaseException as error:
                self._put("coordinator", json.dumps({"failed": (str(error) or repr(error))[:MAX_REASON]}))
                raise
        (answer,) = self._get(["coordinator"])
        offer = _read(answer)
        if "failed" in offer:
            raise UserError(f"rank 0 could not start a coordinator: {offer['failed']}")
        address = str(offer["address"])
        self._check(address, together=together)
        if offer["in_environment"]:
            secret = self._secret_here()
            return Coordination(address, secret, _for_peers(secret), host)
        shared, peers = offer["secret"], bytes.fromhex(offer["peers"])
        return Coordination(address, None if shared is None else str(shared).encode(), peers, host)

    def hosts(self) -> Sequence[Hashable]:
        """Return a host key for each rank, equal for ranks on the same host."""
        place_here = {"name": interface.host_name(), "address": interface.job_address()}
        places = [_read(answer) for answer in self._exchanged("host", json.dumps(place_here))]
        return [(str(place.get("name")), str(place.get("address"))) for place in places]

    def after_the_first(self) -> None:
        """Wait until rank 0 has joined: the others copy its parameters, as under DistributedDataParallel."""
        if self._rank:
            (failed,) = self._get(["first"])
            if failed:
                raise CommunicationError(f"rank 0 did not join: {failed.decode(errors='replace')}")

    def give_up(self, error: BaseException) -> None:
        """Report that this rank does not join, so that the others need not wait for rank 0."""
        if self._rank == 0:
            self._put("first", (str(error) or repr(error))[:MAX_REASON])

    def begin_together(self) -> None:
        """Wait until all ranks have called this, so that none steps before all hold the same parameters."""
        if self._rank == 0:
            self._put("first", "")
        self._exchanged("ready", "")

    def _check(self, address: str, *, together: bool) -> None:
        here = from_environment()
        if here is not None and here[0] != address:
            raise UserError(
                "ranks name different coordinators", got=f"{here[0]} here and {address} at rank 0",
                expected=f"the same {ADDRESS_VARIABLE} on all hosts",
                fix="Start one with headway coordinate and set it on all hosts before headway run.",
            )  # fmt: skip
        if not together and transport.is_local(transport.parse_address(address)[0]):
            raise UserError(
                "the coordinator's address is not reachable from other hosts", got=address,
                expected="an address that all hosts reach",
                fix="Set GLOO_SOCKET_IFNAME, or start headway coordinate --listen HOST:PORT and put the address into "
                f"{ADDRESS_VARIABLE}.",
            )  # fmt: skip

    def _secret_here(self) -> bytes:
        here = from_environment()
        if here is None or here[1] is None:
            raise UserError(
                f"rank {self._rank} lacks the coordinator's secret, which is set in rank 0's environment",
                expected=f"{ADDRESS_VARIABLE} and {SECRET_VARIABLE} in the environment of all ranks",
                fix="Set both on all hosts.",
            )  # fmt: skip
        return here[1]

    def _put(self, key: str, value: str) -> None:
        self._store.set(f"{self._run}/{key}", value)

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        full = [f"{self._run}/{key}" for key in keys]
        try:
            self._store.wait(full, timedelta(seconds=self._timeout_s))
            return [self._store.get(key) for key in full]
        except (RuntimeError, OSError) as error:
            raise CommunicationError(
                f"rank {self._rank}: not all {self._size} ranks wrapped their model within {self._timeout_s:g} s"
            ) from error

    def _exchanged(self, key: str, value: str) -> list[bytes]:
        """Exchange a value with all ranks; returns the values by rank."""
        self._put(f"{key}/{self._rank}", value)
        return self._get([f"{key}/{rank}" for rank in range(self._size)])


def _offered(choice: GeneratorChoice, host: str, *, together: bool) -> dict[str, Any]:
    """Return rank 0's message about the coordinator. Raises UserError if there is none."""
    address, secret = from_environment() or (None, None)
    if address is None:
        process = _kept(choice, interface.LOOPBACK if together else host)
        address, secret = process.address, process.secret
    elif secret is not None:
        return {"address": address, "in_environment": True}
    shared = None if secret is None else secret.decode()
    return {"address": address, "in_environment": False, "secret": shared, "peers": new_secret().hex()}


def _kept(choice: GeneratorChoice, host: str) -> CoordinatorProcess:
    """Return this process's coordinator for such groups, shared by models wrapped one after another."""
    key = str(choice), host
    if key not in _started:
        process = _started[key] = CoordinatorProcess(choice, host=host)
        atexit.register(process.close)  # runs after the model has left: exit handlers run in reverse order
    return _started[key]


def _for_peers(secret: bytes) -> bytes:
    """Derive the secret between ranks from the coordinator's ``secret``."""
    return hmac.digest(secret, b"headway: peers", "sha256")


def _read(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommunicationError("a rank sent a malformed message") from error
    if not isinstance(document, dict):
        raise CommunicationError("a rank sent a malformed message")
    return document


class Closable(Protocol):
    """A wrapped model whose training ends."""

    @property
    def is_closed(self) -> bool:
        """Whether it has finished, or was closed."""


_trained: weakref.WeakSet[Closable] = weakref.WeakSet()


def refuse_second() -> None:
    """Raise UnsupportedError if this process already trains a coordinated model: a process is one worker."""
    if any(not model.is_closed for model in _trained):
        raise UnsupportedError(
            "only one model per process can be averaged by a coordinator", got="a second model",
            expected="one model, or static groups",
            fix="Call headway.finish() on the first, or combine both into one module.",
        )  # fmt: skip


def is_trained(wrapped: Closable) -> None:
    """Register ``wrapped`` as the coordinated model of this process until it is closed."""
    _trained.add(wrapped)


def join(
    meeting: Meeting,
    choice: GeneratorChoice,
    coordination: Coordination,
    construct: Callable[[CoordinatorClient], PartialAllReduce],
) -> PartialAllReduce:
    """Create this worker with ``construct`` once rank 0 has joined the coordinator that ``meeting`` agreed on.

    Raises UserError where the coordinator forms other groups than ``choice``, and what ``construct`` raises.
    """
    try:
        meeting.after_the_first()
        worker = construct(client := CoordinatorClient(coordination.address, coordination.secret))
        if client.generator not in (None, str(choice)):
            worker.close()
            raise UserError(
                "the coordinator's group generator differs from the plan", got=client.generator,
                expected=str(choice), fix="Start it with headway coordinate --plan, or let headway run start it.",
            )  # fmt: skip
    except BaseException as error:
        meeting.give_up(error)
        raise
    return worker
