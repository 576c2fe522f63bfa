"""Serving: a server's port, where workers push gradients and pull parameters, and a worker's way to all servers."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from headway.rpc import frames
from headway.rpc.frames import LARGE_HEADER_BYTES, FrameError, FrameServer, Limits, endpoint
from headway.rpc.trusted import connect
from headway.strategies.silent import in_words
from headway_baselines.asynchronous_servers.shard import Shard

IDLE_S = 7 * 24 * 3600.0  # a worker that computes says nothing; one that is lost closes its connection
LONGEST_ANSWER_S = 24 * 3600.0

Answer = tuple[Mapping[str, Any], torch.Tensor]


class ShardServer:
    """Answers workers about ``shard`` at ``address``, each on a thread of its own. Raises OSError."""

    def __init__(self, shard: Shard, host: str, secret: bytes, world_size: int) -> None:
        self._shard, self._world_size = shard, world_size
        self._server = FrameServer(
            host, secret, self._answer, capacity=world_size, name="headway-parameter-server"
        )
        self.address = self._server.address

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()

    def _answer(self, connection: socket.socket) -> None:
        worker = -1
        try:
            while True:
                limits = Limits(LARGE_HEADER_BYTES, self._shard.form.size_bytes)
                header, payload = frames.receive(connection, limits, time.monotonic() + IDLE_S)
                worker = self._known(header.get("worker"))
                if header.get("kind") == "here":
                    continue
                if header.get("kind") == "leave":
                    self._shard.left(worker)
                    continue
                self._answer_one(connection, worker, header, payload)
        finally:
            if worker >= 0:
                self._shard.left(worker)

    def _answer_one(
        self, connection: socket.socket, worker: int, header: Mapping[str, Any], payload: memoryview
    ) -> None:
        wait_s = min(float(header["wait_s"]), LONGEST_ANSWER_S)
        deadline = time.monotonic() + wait_s
        try:
            if header.get("kind") == "push":
                if len(payload) != self._shard.form.size_bytes:
                    raise FrameError("gradients of another size")
                said, message = self._shard.push(worker, header, as_tensor(payload), deadline)
            else:
                said, message = self._shard.pull(deadline)
        except (KeyError, TypeError, ValueError, TimeoutError, RuntimeError) as error:
            frames.send(connection, {"failed": str(error)[:200]}, b"", time.monotonic() + 5.0)
            return
        frames.send(connection, said, as_bytes(message), deadline + 5.0)

    def _known(self, worker: object) -> int:
        if not isinstance(worker, int) or not 0 <= worker < self._world_size:
            raise FrameError("no worker of this job")
        return worker


class Servers:
    """One worker's way to the servers at ``addresses``, its own among them, which it asks without a connection."""

    def __init__(
        self, worker: int, own: Shard, addresses: Sequence[str], sizes_bytes: Sequence[int], secret: bytes,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._worker, self._own = worker, own
        self._addresses, self._sizes_bytes, self._secret = addresses, sizes_bytes, secret
        self._timeout_s = timeout_s
        self._connections: dict[int, socket.socket] = {}
        self._threads = ThreadPoolExecutor(max(1, len(addresses) - 1), "headway-servers")

    def connect(self) -> None:
        """Connect to every other server, which then knows whose connection it is. Raises OSError."""
        for server in self._others:
            deadline = time.monotonic() + self._timeout_s
            header = {"kind": "here", "worker": self._worker}
            frames.send(self._connection(server, deadline), header, b"", deadline)

    def push(
        self, header: Mapping[str, Any], each: Sequence[Mapping[str, Any]], gradients: Sequence[torch.Tensor]
    ) -> list[Answer]:
        """Push to all servers concurrently, what ``each`` is told besides; what they answer. Raises OSError."""
        headers = [{**header, **own, "kind": "push"} for own in each]
        others = {
            server: self._threads.submit(self._asked, server, headers[server], gradients[server])
            for server in self._others
        }
        deadline = time.monotonic() + self._timeout_s
        own = self._own.push(self._worker, headers[self._worker], gradients[self._worker], deadline)
        return [own if server == self._worker else others[server].result() for server in range(len(each))]

    def pull(self) -> list[Answer]:
        """What every server holds now. Raises OSError."""
        nothing = torch.empty(0, dtype=torch.uint8)
        others = {
            server: self._threads.submit(self._asked, server, {"kind": "pull"}, nothing)
            for server in self._others
        }
        own = self._own.pull(time.monotonic() + self._timeout_s)
        return [
            own if server == self._worker else others[server].result()
            for server in range(len(self._addresses))
        ]

    def leave(self) -> None:
        """Tell every server that this worker pushes nothing more."""
        for server in self._others:
            with suppress(OSError):  # one that is gone needs no word
                deadline = time.monotonic() + self._timeout_s
                header = {"kind": "leave", "worker": self._worker}
                frames.send(self._connection(server, deadline), header, b"", deadline)
        self._own.left(self._worker)

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        while self._connections:
            self._connections.popitem()[1].close()

    @property
    def _others(self) -> list[int]:
        return [server for server in range(len(self._addresses)) if server != self._worker]

    def _connection(self, server: int, deadline: float) -> socket.socket:
        if server not in self._connections:
            self._connections[server] = connect(endpoint(self._addresses[server]), self._secret, deadline)
        return self._connections[server]

    def _asked(self, server: int, header: Mapping[str, Any], gradients: torch.Tensor) -> Answer:
        deadline = time.monotonic() + self._timeout_s
        said = {**header, "worker": self._worker, "wait_s": self._timeout_s}
        try:
            connection = self._connection(server, deadline)
            frames.send(connection, said, as_bytes(gradients), deadline)
            limits = Limits(payload_bytes=self._sizes_bytes[server])
            answer, message = frames.receive(connection, limits, deadline + 5.0)
        except OSError as error:
            raise ConnectionError(f"{in_words([server])} ({error})") from error
        if "failed" in answer:
            raise ConnectionError(str(answer["failed"])[:200])
        if len(message) != self._sizes_bytes[server]:
            raise FrameError("parameters of another size")
        return answer, as_tensor(message)


def as_tensor(received: memoryview) -> torch.Tensor:
    """Bytes as a tensor of bytes."""
    if not received:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(received, dtype=torch.uint8)


def as_bytes(message: torch.Tensor) -> memoryview:
    """A tensor of bytes as bytes."""
    return message.numpy().data
