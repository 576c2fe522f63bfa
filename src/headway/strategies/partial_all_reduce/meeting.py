"""Workers find each other: a launcher's coordinator, who is on which host, and joining it."""

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
    """Serve workers on this host while the block runs; gives the variables by which they find it.

    None where the environment names a coordinator already. Raises LaunchError where it does not start.
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
    """Who forms the groups of ``strategy``, which are not static."""
    return GeneratorChoice(strategy.groups, strategy.generator_options, strategy.seed)


MAX_SAID = 4096
_runs = count(1)
_started: dict[tuple[str, str], CoordinatorProcess] = {}


# Meeting: the ranks of a process group find each other, and the coordinator that forms their groups.
#
# They use the job's store once, when a model is wrapped, and not while it trains. The coordinator is the one that rank
# 0's environment names, which a launcher or a user has put there; where there is none, rank 0 starts one, which ends with
# it.


@dataclass(frozen=True, slots=True)
class Coordination:
    """Where the coordinator is, its ``secret``, the one that ranks prove to each other, and this rank's address."""

    address: str
    secret: bytes | None
    peers_secret: bytes
    host: str


class Meeting:
    """The ranks of the default process group, for one wrapped model. Every rank makes it, in the same order.

    Waiting for another rank raises CommunicationError after ``timeout_s``.
    """

    def __init__(self, timeout_s: float) -> None:
        self._store = torch_private.default_store()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self._run = f"headway/averaged/{next(_runs)}"

    def coordination(self, choice: GeneratorChoice) -> Coordination:
        """Agree on the coordinator; rank 0 starts one with ``choice`` where its environment names none.

        A secret that came with the environment stays there: it is not told to anybody through the store. Raises
        UserError where none starts, where ranks name different ones or know no secret of it, and where it cannot be
        reached.
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
                self._put("coordinator", json.dumps({"failed": (str(error) or repr(error))[:MAX_SAID]}))
                raise
        (answer,) = self._get(["coordinator"])
        offer = _read(answer)
        if "failed" in offer:
            raise UserError(f"rank 0 has no coordinator: {offer['failed']}")
        address = str(offer["address"])
        self._check(address, together=together)
        if offer["in_environment"]:
            secret = self._secret_here()
            return Coordination(address, secret, _for_peers(secret), host)
        shared, peers = offer["secret"], bytes.fromhex(offer["peers"])
        return Coordination(address, None if shared is None else str(shared).encode(), peers, host)

    def hosts(self) -> Sequence[Hashable]:
        """What each rank, by rank, is on: the same of two ranks where they are on one host."""
        place_here = {"name": interface.host_name(), "address": interface.job_address()}
        places = [_read(answer) for answer in self._exchanged("host", json.dumps(place_here))]
        return [(str(place.get("name")), str(place.get("address"))) for place in places]

    def after_the_first(self) -> None:
        """Return once rank 0 has joined: the others begin with its parameters, as under DistributedDataParallel."""
        if self._rank:
            (failed,) = self._get(["first"])
            if failed:
                raise CommunicationError(f"rank 0 did not join: {failed.decode(errors='replace')}")

    def give_up(self, error: BaseException) -> None:
        """This rank does not join: where it is the first, the others need not wait for it."""
        if self._rank == 0:
            self._put("first", (str(error) or repr(error))[:MAX_SAID])

    def begin_together(self) -> None:
        """Return when every rank has called this: none makes a step before all have the same parameters."""
        if self._rank == 0:
            self._put("first", "")
        self._exchanged("ready", "")

    def _check(self, address: str, *, together: bool) -> None:
        here = from_environment()
        if here is not None and here[0] != address:
            raise UserError(
                "ranks name different coordinators", got=f"{here[0]} here and {address} at rank 0",
                expected=f"the same {ADDRESS_VARIABLE} on all hosts",
                fix="Start one with headway coordinate, and name it on all hosts before headway run.",
            )  # fmt: skip
        if not together and transport.is_local(transport.parse_address(address)[0]):
            raise UserError(
                "the coordinator's address reaches no other host, and ranks are on several", got=address,
                expected="an address that all hosts reach",
                fix="Set GLOO_SOCKET_IFNAME, or start headway coordinate --listen HOST:PORT and name it in "
                f"{ADDRESS_VARIABLE}.",
            )  # fmt: skip

    def _secret_here(self) -> bytes:
        here = from_environment()
        if here is None or here[1] is None:
            raise UserError(
                f"rank {self._rank} does not know the secret of the coordinator, which rank 0's environment has",
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
        """What every rank says under ``key``, by rank."""
        self._put(f"{key}/{self._rank}", value)
        return self._get([f"{key}/{rank}" for rank in range(self._size)])


def _offered(choice: GeneratorChoice, host: str, *, together: bool) -> dict[str, Any]:
    """What rank 0 tells the others of the coordinator. Raises UserError where there is none."""
    address, secret = from_environment() or (None, None)
    if address is None:
        process = _kept(choice, interface.LOOPBACK if together else host)
        address, secret = process.address, process.secret
    elif secret is not None:
        return {"address": address, "in_environment": True}
    shared = None if secret is None else secret.decode()
    return {"address": address, "in_environment": False, "secret": shared, "peers": new_secret().hex()}


def _kept(choice: GeneratorChoice, host: str) -> CoordinatorProcess:
    """The one coordinator of this process for such groups: models that are wrapped one after the other share it."""
    key = str(choice), host
    if key not in _started:
        process = _started[key] = CoordinatorProcess(choice, host=host)
        atexit.register(
            process.close
        )  # after the wrapped model has left: what is registered last comes first
    return _started[key]


def _for_peers(secret: bytes) -> bytes:
    """What ranks prove to each other, who all know the coordinator's ``secret``, which that does not give away."""
    return hmac.digest(secret, b"headway: peers", "sha256")


def _read(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommunicationError("a rank said what nobody can read") from error
    if not isinstance(document, dict):
        raise CommunicationError("a rank said what nobody can read")
    return document


class Closable(Protocol):
    """A wrapped model whose training ends."""

    @property
    def is_closed(self) -> bool:
        """Whether it has finished, or was closed."""


_trained: weakref.WeakSet[Closable] = weakref.WeakSet()


def refuse_second() -> None:
    """Raise UnsupportedError where this process has a coordinated model that has not finished: it is one worker."""
    if any(not model.is_closed for model in _trained):
        raise UnsupportedError(
            "a process has one model that a coordinator's groups average", got="another one",
            expected="one, or static groups", fix="Call headway.finish(model) of the first one, or put both into one.",
        )  # fmt: skip


def is_trained(wrapped: Closable) -> None:
    """From now on ``wrapped`` is the coordinated model of this process, until it is closed."""
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
                "the coordinator forms other groups than the plan says", got=client.generator,
                expected=str(choice), fix="Start it with headway coordinate --plan, or leave it to headway run.",
            )  # fmt: skip
    except BaseException as error:
        meeting.give_up(error)
        raise
    return worker
