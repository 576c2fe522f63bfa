"""Peers: what one rank may ask of another without the other's script taking part.

A thread on every rank answers: with the shard of a reduced gradient, with the shard of an optimizer's state, with how
far the rank has come. So a look on one rank alone (a checkpoint or a log written by rank 0) needs nothing from the
scripts of the others, and a failure can be pinned on a rank. Connections are trusted ones, behind a secret that only
the ranks of one wrapped model share.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, HeadwayError, UnsupportedError, one_line
from headway.rpc import interface, trusted
from headway.rpc.trusted import receive_exactly, remaining_s
from headway.strategies.decoupled.condition import Condition
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.departure import Departure

_SIZES = struct.Struct("!QQ")  # of the header and of the payload, in bytes
HEADER_BYTES = 64 * 2**10

Reply = tuple[Mapping[str, Any], Sequence[torch.Tensor]]
"""A header, and flat CPU tensors."""


class TooLargeError(ConnectionError):
    """A message says that it is larger than it can be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a message may be."""

    header_bytes: int = HEADER_BYTES
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A message: its header, and its tensors one after the other as bytes."""

    header: dict[str, Any]
    payload: memoryview


def send(connection: socket.socket, message: Reply, deadline: float) -> None:
    """Send ``message``. Raises TimeoutError where it is not taken before ``deadline``, OSError where it cannot be."""
    header, tensors = message
    text = json.dumps(dict(header)).encode()
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    connection.settimeout(remaining_s(deadline))
    connection.sendall(_SIZES.pack(len(text), size_bytes) + text)
    for tensor in tensors:
        if tensor.numel():
            connection.settimeout(remaining_s(deadline))
            connection.sendall(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def receive(connection: socket.socket, limits: Limits, deadline: float) -> Answer:
    """The next message. Raises TooLargeError before anything is allocated for it, TimeoutError, ConnectionError."""
    header_bytes, payload_bytes = _SIZES.unpack(receive_exactly(connection, _SIZES.size, deadline))
    for what, size_bytes, limit_bytes in (
        ("header", header_bytes, limits.header_bytes),
        ("payload", payload_bytes, limits.payload_bytes),
    ):
        if size_bytes > limit_bytes:
            raise TooLargeError(f"a {what} of {size_bytes} bytes; expected at most {limit_bytes}")
    header = json.loads(receive_exactly(connection, header_bytes, deadline))
    return Answer(header, memoryview(receive_exactly(connection, payload_bytes, deadline)))


ADDRESS_BYTES = 64
STATUS_TIMEOUT_S = 10.0
PRESENCE_TIMEOUT_S = 2.0
REQUEST_S = 30.0
"""How long a rank that has connected may take to say what it wants."""
MAX_REFUSAL = 1000
ASKED_AT_ONCE = 4
"""How many questions of one rank may be open at a time: its script's, and those of threads that found a failure."""


class Respondent(Protocol):
    """Who answers on this rank."""

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """Return a header and flat CPU tensors. May wait; runs on a thread of its own."""

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has asked for, and the last of them."""

    @property
    def failed(self) -> bool:
        """Whether this rank has given up."""

    @property
    def closed(self) -> bool:
        """Whether this rank has let go of the model, or is about to."""

    @property
    def steps(self) -> int:
        """How many steps of optimizers this rank has taken."""

    def asked_for(self, sequence: int) -> list[Any] | None:
        """What this rank's collective of that number is; None where it has not asked for it, or long ago."""

    @property
    def request_limits(self) -> Limits:
        """How large a request may be."""


class Peers:
    """The ranks of ``group``. Made on every rank at the same time; collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._names = dist.get_process_group_ranks(group)  # what a user calls these ranks
        timeout = torch_private.group_timeout(group)
        self.timeout_s = 1800.0 if timeout is None else timeout.total_seconds()
        self._respondent: Respondent | None = None
        self._blamed = ""  # who is to blame for a failure, as soon as this rank knows or is told
        self._ending = False
        self._key = f"headway/{torch_private.group_name(group)}"
        self._store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
        if self.world_size > 1:
            self._open(group)
        self._departure = Departure(self._store, self._key, self.rank, self.world_size, self._is_there)

    def _open(self, group: dist.ProcessGroup) -> None:
        found = _all_gather(trusted.new_secret() + _padded(interface.job_address()), group)
        self._secret = found[0][: trusted.SECRET_BYTES]
        address = interface.reachable_address(
            [_text(each[trusted.SECRET_BYTES :]) for each in found], self.rank
        )
        self._server = self._listening(address)
        mine = _padded(f"{address}:{self._server.port}")
        self._addresses = [_endpoint(_text(each)) for each in _all_gather(mine, group)]
        # A store may outlive a group whose name is used again.
        self._key += f"/{hashlib.sha256(self._secret).hexdigest()[:16]}"

    def answer_with(self, respondent: Respondent | None) -> None:
        """Answer requests with ``respondent`` from now on, or refuse them."""
        self._respondent = respondent

    def gone(self) -> None:
        """Tell the other ranks that this one will ask nothing more."""
        self._departure.leave()

    def script_ends(self) -> None:
        """Tell ranks that ask from now on that this one will begin no further collective."""
        self._ending = True

    def script_fails(self, error: BaseException | None) -> None:
        """Tell the other ranks what this one's script has ended with."""
        if not self._blamed:
            name = f"the script of rank {self._names[self.rank]}"
            self._blame(f"{name} has ended with {type(error).__name__}: {one_line(str(error), 200)}")

    def all_gone(self, timeout_s: float = 0.0) -> bool:
        """Whether no rank will ask anything more; waits for that up to ``timeout_s``."""
        return self._departure.everyone_left(timeout_s)

    def _is_there(self, rank: int) -> bool:
        try:
            with socket.create_connection(self._addresses[rank], PRESENCE_TIMEOUT_S):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """Stop answering."""
        if self.world_size > 1:
            self._server.close()

    # Asking ------------------------------------------------------------------------------------------

    def ask(self, rank: int, request: Mapping[str, Any], limits: Limits) -> Answer:
        """Ask ``rank`` for at most ``limits``.

        Raises CommunicationError where it does not answer in the group's timeout, with more, or cannot.
        """
        try:
            answer = self._ask(rank, request, limits, self.timeout_s)
        except TooLargeError as error:
            raise CommunicationError(
                f"rank {self._names[rank]}: its answer about {request['want']} is too large: {error}. "
                "Restart the job from its last checkpoint."
            ) from error
        except OSError as error:
            raise CommunicationError(
                f"rank {self._names[self.rank]}: {self.culprit()} (while it was asked for {request['want']}: "
                f"{type(error).__name__}). Restart the job from its last checkpoint."
            ) from error
        if "refused" in answer.header:
            raise CommunicationError(f"rank {self._names[rank]}: {answer.header['refused']}")
        return answer

    def ask_all(self, request: Mapping[str, Any], limits: Callable[[int], Limits]) -> dict[int, Answer]:
        """Ask every other rank at once, each for at most its ``limits``; answers by rank."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if not others:
            return {}
        with ThreadPoolExecutor(len(others)) as pool:
            answers = pool.map(lambda rank: self.ask(rank, request, limits(rank)), others)
            return dict(zip(others, answers, strict=True))

    def _ask(self, rank: int, request: Mapping[str, Any], limits: Limits, timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        with trusted.connect(self._addresses[rank], self._secret, deadline) as connection:
            send(connection, (request, ()), deadline)
            return receive(connection, limits, deadline)

    # Who is to blame ---------------------------------------------------------------------------------

    def culprit(self, own_fault: str = "") -> str:
        """Name the rank that a failed collective is due to, and what is known of it. Every rank names the same.

        ``own_fault`` is what failed on this rank, if it is to blame: peers that ask later are told.
        """
        if not self._blamed:
            failed = f"rank {self._names[self.rank]} failed with {own_fault}"
            self._blame(self._noted() or (failed if own_fault else self._find_culprit()))
        return self._blamed

    def _noted(self) -> str:
        """Who is to blame, as another rank has noted; "" where nobody has."""
        with suppress(Exception):  # the store may have gone down, or be frozen, with its host
            if self._store.check([self._key]):
                return str(self._store.get(self._key).decode())
        return self._blamed

    def _blame(self, found: str) -> None:
        """Note who is to blame unless another rank has, and tell the others: the store may go with the first to end."""
        noted = found
        with suppress(Exception):
            noted = str(self._store.compare_set(self._key, "", found).decode())
        if self._blamed:  # told meanwhile
            return
        self._blamed = noted

        def tell(rank: int) -> None:
            with suppress(OSError):
                request = {"want": "blame", "blamed": noted[:MAX_REFUSAL]}
                self._ask(rank, request, Limits(), PRESENCE_TIMEOUT_S)

        _of_all(tell, self._others)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def disagreement(self, job: Job) -> str:
        """Proof that some rank will never take part in ``job``, for which this one waits; "" where there is none.

        Ranks ask for the same collectives in the same order. One that has asked for another one in its place, or whose
        script has ended before it, never comes to it.
        """
        if self._blamed:
            return self._blamed
        request = {"want": "job", "sequence": job.sequence}

        def proof(rank: int) -> str:
            try:
                timeout_s = min(STATUS_TIMEOUT_S, self.timeout_s)
                header = self._ask(rank, request, Limits(), timeout_s).header
            except OSError:  # it may be slow; where it has ended, the collective fails by itself
                return ""
            name, theirs = f"rank {self._names[rank]}", header.get("job")
            if theirs is None and header.get("ending") and int(header["submitted"]) <= job.sequence:
                steps = int(header["steps"])
                late = f" It took {_steps(steps)}, this rank {job.steps}" if steps < job.steps else ""
                return f"the script of {name} has ended without {job}, for which others wait.{late}"
            if theirs is None or theirs == job.identity:
                return ""
            here = f"rank {self._names[self.rank]}"
            few, many = (name, here) if theirs[3] < job.steps else (here, name)
            if theirs[3] != job.steps:
                step = min(theirs[3], job.steps) + 1
                return (
                    f"{few} did not take optimizer step {step}, which {many} took (counted from 1 since the model was "
                    "wrapped, or its buckets were changed): an optimizer must step on every rank or on none"
                )
            return f"{here} has come to {job}, and {name} to a {theirs[0]} of bucket {theirs[1]} in its place"

        found = next(filter(None, _of_all(proof, self._others)), "")
        if found:
            self._blame(found)
        return self._blamed

    def _find_culprit(self) -> str:
        others = self._others
        states = dict(zip(others, _of_all(self._state_of, others), strict=True))
        if self._blamed:  # a peer has told meanwhile
            return self._blamed
        for wanted, one_did, several_did in (
            ("ended", "has ended", "have ended"), ("stopped", "does not answer", "do not answer")
        ):  # fmt: skip
            found = [rank for rank, (state, _, _) in states.items() if state == wanted]
            if found:
                if len(found) == 1:
                    return f"{_ranks([self._names[found[0]]])} {one_did}"
                first = "; which of them was the first to fail cannot be told from here"
                return f"{_ranks([self._names[r] for r in found])} {several_did}{first}"
        assert self._respondent is not None
        submitted, _ = self._respondent.progress
        behind = {rank: state for rank, state in states.items() if state[1] < submitted}
        if behind:
            rank = min(behind, key=lambda each: behind[each][1])
            _, count, last = behind[rank]
            after = f", after {last}" if last else ""
            return f"rank {self._names[rank]} is {submitted - count} collectives behind{after}"
        return "every rank answers; a connection between them was lost"

    def _state_of(self, rank: int) -> tuple[str, int, str]:
        timeout_s = min(STATUS_TIMEOUT_S, self.timeout_s)
        try:
            header = self._ask(rank, {"want": "progress"}, Limits(), timeout_s).header
        except TimeoutError:
            return "stopped", 0, ""
        except OSError:
            return "ended", 0, ""
        return "alive", int(header["submitted"]), str(header["last"])

    # Answering ---------------------------------------------------------------------------------------

    def _listening(self, address: str) -> trusted.TrustedServer:
        def listening(host: str) -> trusted.TrustedServer:
            return trusted.TrustedServer(
                host, self._secret, self._answer,
                capacity=ASKED_AT_ONCE * self.world_size, name="headway-peers",
            )  # fmt: skip

        try:
            return listening(address)
        except OSError:  # no address of this machine: others know it by one that is translated
            return listening(interface.EVERY_ADDRESS)

    def _answer(self, connection: socket.socket) -> None:
        respondent = self._respondent
        limits = Limits() if respondent is None else respondent.request_limits
        request = receive(connection, limits, time.monotonic() + REQUEST_S).header
        send(connection, self._reply(request), time.monotonic() + self.timeout_s)

    def _reply(self, request: Mapping[str, Any]) -> Reply:
        if self._respondent is None:
            return {"refused": "nothing is in flight there"}, []
        if request["want"] == "progress":
            submitted, last = self._respondent.progress
            return {"submitted": submitted, "last": last}, []
        if request["want"] == "blame":
            self._blamed = self._blamed or one_line(str(request["blamed"]), limit=MAX_REFUSAL)
            return {}, []
        if request["want"] == "job":
            asked_for = self._respondent.asked_for(int(request["sequence"]))
            return {
                "job": asked_for, "submitted": self._respondent.progress[0],
                "steps": self._respondent.steps, "ending": self._ending or self._respondent.closed,
            }, []  # fmt: skip
        try:
            return self._respondent.answer(request)
        except Exception as error:  # sent to who asked, who raises it
            return {"refused": one_line(str(error), limit=MAX_REFUSAL)}, []


Found = TypeVar("Found")


def _of_all(ask: Callable[[int], Found], ranks: Sequence[int]) -> list[Found]:
    """What ``ask`` finds of each rank: of all at once, or one by one where the interpreter is shutting down."""
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        try:
            return [future.result() for future in [pool.submit(ask, rank) for rank in ranks]]
        except RuntimeError:
            return [ask(rank) for rank in ranks]


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'} of optimizers"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _all_gather(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, tensor, group=group)
    return [bytes(each.numpy().tobytes()) for each in everyones]


def _padded(text: str) -> bytes:
    return text.encode().ljust(ADDRESS_BYTES, b"\0")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


POLL_S = 0.001


class Asking:
    """What the parts of an engine ask ``peers``."""

    def __init__(self, peers: Peers, condition: Condition) -> None:
        self._peers = peers
        self._condition = condition

    def ask_all(self, request: Mapping[str, Any], limits: Callable[[int], Limits]) -> dict[int, Answer]:
        """Ask every other rank, for at most its limits. Raises CommunicationError where one fails, and ever after."""
        try:
            return self._peers.ask_all(request, limits)
        except HeadwayError as error:
            self._condition.failure = error
            raise

    def until(self, holds: Callable[[], bool]) -> None:
        """Return when ``holds`` is true, which a peer asked about. Raises UnsupportedError where it never is."""
        deadline = time.monotonic() + self._peers.timeout_s
        while not holds():
            if self._condition.failure is not None or self._condition.closed or time.monotonic() > deadline:
                raise UnsupportedError("a rank did not reach the point that another rank asked about")
            time.sleep(POLL_S)
