"""Peers: what one rank may ask of another without the other's script taking part.

A thread on every rank answers: with the shard of a reduced gradient, with the shard of an optimizer's state, with how
far the rank has come. So a look on one rank alone (a checkpoint or a log written by rank 0) needs nothing from the
scripts of the others, and a failure can be pinned on a rank. Messages are JSON headers and raw bytes of tensors over
TCP, behind a secret that only the ranks of one wrapped model share; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError

ADDRESS_BYTES = 64
SECRET_BYTES = 32
STATUS_TIMEOUT_S = 10.0
PRESENCE_TIMEOUT_S = 2.0
PRESENCE_EVERY_S = 1.0
LONGEST_POLL_S = 0.2
GONE_POLL_S = 0.05
MAX_HEADER_BYTES = 64 * 2**20
Reply = tuple[dict[str, Any], list[torch.Tensor]]


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


@dataclass(frozen=True, slots=True)
class Answer:
    """A peer's answer: its header, and its tensors one after the other as bytes."""

    header: dict[str, Any]
    payload: memoryview


class Peers:
    """The ranks of ``group``. Made on every rank at the same time; collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._names = dist.get_process_group_ranks(group)  # what a user calls these ranks
        timeout = torch_private.group_timeout(group)
        self.timeout_s = 1800.0 if timeout is None else timeout.total_seconds()
        self._respondent: Respondent | None = None
        self._key = f"headway/{torch_private.group_name(group)}"
        self._store = torch_private.default_store()
        if self.world_size == 1:
            return
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._server = threading.Thread(target=self._serve, name="headway-peers", daemon=True)
        self._server.start()
        mine = f"{_address()}:{self._listener.getsockname()[1]}".encode().ljust(ADDRESS_BYTES, b"\0")
        self._addresses = [_endpoint(each) for each in _all_gather(mine, group)]
        self._secret = _all_gather(secrets.token_bytes(SECRET_BYTES), group)[0]
        # A store may outlive a group whose name is used again.
        self._key += f"/{hashlib.sha256(self._secret).hexdigest()[:16]}"

    def answer_with(self, respondent: Respondent | None) -> None:
        """Answer requests with ``respondent`` from now on, or refuse them."""
        self._respondent = respondent

    def gone(self) -> None:
        """Tell the other ranks that this one will ask nothing more."""
        with suppress(Exception):  # the store may have gone down with its host
            self._store.set(self._gone(self.rank), b"")

    def all_gone(self, timeout_s: float = 0.0) -> bool:
        """Whether no rank will ask anything more; waits for that up to ``timeout_s``."""
        left = [rank for rank in range(self.world_size) if rank != self.rank]
        now = look = time.monotonic()
        deadline = now + timeout_s
        pause_s = GONE_POLL_S
        with suppress(Exception):  # a store that went down served everybody's last question
            while left := [rank for rank in left if not self._store.check([self._gone(rank)])]:
                if now >= look:
                    left = [rank for rank in left if self._is_there(rank)]
                    look = now + PRESENCE_EVERY_S
                if left and now >= deadline:
                    return False
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_POLL_S)
                now = time.monotonic()
        return True

    def _is_there(self, rank: int) -> bool:
        try:
            with socket.create_connection(self._addresses[rank], PRESENCE_TIMEOUT_S):
                return True
        except OSError:
            return False

    def _gone(self, rank: int) -> str:
        return f"{self._key}/gone/{rank}"

    def close(self) -> None:
        """Stop answering."""
        if self.world_size > 1:
            with suppress(OSError):  # wakes the thread that accepts
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._server.join(1.0)

    # Asking ------------------------------------------------------------------------------------------

    def ask(self, rank: int, request: Mapping[str, Any]) -> Answer:
        """Ask ``rank``. Raises CommunicationError where it does not answer in the group's timeout, or cannot."""
        try:
            answer = self._ask(rank, request, self.timeout_s)
        except (OSError, EOFError, AuthenticationError) as error:
            raise CommunicationError(
                f"rank {self._names[self.rank]}: {self.culprit()} (while it was asked for {request['want']}: "
                f"{type(error).__name__}). Restart the job from its last checkpoint."
            ) from error
        if "refused" in answer.header:
            raise CommunicationError(f"rank {self._names[rank]}: {answer.header['refused']}")
        return answer

    def ask_all(self, request: Mapping[str, Any]) -> dict[int, Answer]:
        """Ask every other rank at once; answers by rank."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        if not others:
            return {}
        with ThreadPoolExecutor(len(others)) as pool:
            return dict(zip(others, pool.map(lambda rank: self.ask(rank, request), others), strict=True))

    def _ask(self, rank: int, request: Mapping[str, Any], timeout_s: float) -> Answer:
        deadline = time.monotonic() + timeout_s
        with socket.create_connection(self._addresses[rank], timeout_s) as raw:
            raw.settimeout(None)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with Connection(raw.detach()) as connection:
                _expect(connection, deadline)
                answer_challenge(connection, self._secret)
                connection.send_bytes(json.dumps(dict(request)).encode())
                _expect(connection, deadline)
                header = json.loads(connection.recv_bytes(MAX_HEADER_BYTES))
                payload = bytearray(header["bytes"])
                place = 0
                while place < len(payload):
                    _expect(connection, deadline)
                    place += connection.recv_bytes_into(payload, place)
        return Answer(header["header"], memoryview(payload))

    # Who is to blame ---------------------------------------------------------------------------------

    def culprit(self) -> str:
        """Name the rank that a failed collective is due to, and what is known of it. Every rank names the same."""
        with suppress(Exception):  # the store may have gone down with its host
            if self._store.check([self._key]):
                return str(self._store.get(self._key).decode())
        found = self._find_culprit()
        with suppress(Exception):
            return str(self._store.compare_set(self._key, "", found).decode())
        return found

    def _find_culprit(self) -> str:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            states = dict(zip(others, pool.map(self._state_of, others), strict=True))
        for wanted, one_did, several_did in (
            ("ended", "has ended", "have ended"), ("stopped", "does not answer", "do not answer")
        ):  # fmt: skip
            found = [rank for rank, (state, _, _) in states.items() if state == wanted]
            if found:
                return (
                    f"{_ranks([self._names[r] for r in found])} {several_did if len(found) > 1 else one_did}"
                )
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
        try:
            header = self._ask(rank, {"want": "progress"}, min(STATUS_TIMEOUT_S, self.timeout_s)).header
        except TimeoutError:
            return "stopped", 0, ""
        except (OSError, EOFError, AuthenticationError):
            return "ended", 0, ""
        return "alive", int(header["submitted"]), str(header["last"])

    # Answering ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(accepted,), daemon=True).start()

    def _answer(self, accepted: socket.socket) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError, EOFError, AuthenticationError), Connection(accepted.detach()) as connection:
            deliver_challenge(connection, self._secret)
            header, tensors = self._reply(json.loads(connection.recv_bytes(MAX_HEADER_BYTES)))
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            connection.send_bytes(json.dumps({"header": header, "bytes": size_bytes}).encode())
            for tensor in tensors:
                if tensor.numel():
                    connection.send_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def _reply(self, request: Mapping[str, Any]) -> Reply:
        if self._respondent is None:
            return {"refused": "nothing is under way there"}, []
        if request["want"] == "progress":
            submitted, last = self._respondent.progress
            return {"submitted": submitted, "last": last}, []
        try:
            return self._respondent.answer(request)
        except Exception as error:  # sent to who asked, who raises it
            return {"refused": str(error)}, []


def _expect(connection: Connection, deadline: float) -> None:
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError("no answer in time")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _all_gather(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, tensor, group=group)
    return [bytes(each.numpy().tobytes()) for each in everyones]


def _endpoint(text: bytes) -> tuple[str, int]:
    host, _, port = text.rstrip(b"\0").decode().rpartition(":")
    return host, int(port)


def _address() -> str:
    """The address under which peers reach this process: the one it has on the way to the job's master."""
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return "127.0.0.1" if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else _own_name()
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only looks up the route
        return str(probe.getsockname()[0])


def _own_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
