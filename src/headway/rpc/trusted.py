"""TCP connections between processes of one job that authenticate both ends with the job's secret.

    server to client   a nonce
    client to server   a nonce, and a proof: the MAC of both nonces under the secret
    server to client   a proof

Proofs are HMAC-SHA-256 and name the side that gives them, so that none can be reflected. Traffic afterwards is neither
encrypted nor signed: like Gloo's, these connections assume a network on which nobody can tamper with traffic.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""Time limit to authenticate; ranks on busy machines can be slow."""
MAX_STRANGERS = 256
"""Limit of unauthenticated connections; more evict the oldest, whose client retries."""
ATTEMPTS = 6
FIRST_PAUSE_S = 0.05
BACKLOG = 1024
AFTER_FAILURE_S = 0.1


class UntrustedError(ConnectionError):
    """The other end does not know the secret."""


def new_secret() -> bytes:
    """Create a secret for the processes of one job."""
    return secrets.token_bytes(SECRET_BYTES)


@dataclass(slots=True)
class _Stranger:
    """A connection that is not authenticated yet."""

    connection: socket.socket
    deadline: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    received: bytes = b""


class TrustedServer:
    """Listens on ``host`` and calls ``answer`` with each authenticated connection, on a thread of its own.

    One thread handles all unauthenticated connections. ``answer`` may run ``capacity`` times at once; further
    connections are closed. It need not close its connection, and an OSError in it ends the connection. An empty
    ``host`` means all addresses. Raises OSError if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        secret: bytes,
        answer: Callable[[socket.socket], None],
        *,
        capacity: int,
        name: str,
    ) -> None:
        self._secret = secret
        self._answer = answer
        self._name = name
        self._free = threading.Semaphore(capacity)
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop listening; connections that have proved themselves are answered to their end."""
        self._closing = True
        with suppress(OSError):  # wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._look()
        finally:
            for stranger in list(self._strangers.values()):
                self._drop(stranger)
            self._selector.close()
            self._listener.close()

    def _look(self) -> None:
        """Wait for an event and handle it."""
        deadline = min((waiting.deadline for waiting in self._strangers.values()), default=None)
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := self._strangers.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._hear(stranger)
        now = time.monotonic()
        for stranger in [late for late in self._strangers.values() if late.deadline <= now]:
            self._drop(stranger)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._closing:  # out of descriptors, or the other end is gone again
                time.sleep(AFTER_FAILURE_S)
            return
        connection.setblocking(False)
        stranger = _Stranger(connection, time.monotonic() + HANDSHAKE_S)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers) > MAX_STRANGERS:
            self._drop(next(iter(self._strangers.values())))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(stranger.nonce)
        except OSError:
            self._drop(stranger)

    def _hear(self, stranger: _Stranger) -> None:
        wanted = NONCE_BYTES + PROOF_BYTES - len(stranger.received)
        try:
            part = stranger.connection.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._drop(stranger)
            return
        stranger.received += part
        if len(part) == wanted:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        nonce, proof = stranger.received[:NONCE_BYTES], stranger.received[NONCE_BYTES:]
        nonces = stranger.nonce + nonce
        if not hmac.compare_digest(proof, _proof(self._secret, b"client", nonces)):
            self._drop(stranger)
            return
        if not self._free.acquire(blocking=False):
            self._drop(stranger)
            return
        connection = stranger.connection
        self._forget(stranger)
        try:
            connection.sendall(_proof(self._secret, b"server", nonces))
            connection.setblocking(True)
            thread = threading.Thread(
                target=self._answered, args=(connection,), name=f"{self._name}-answer", daemon=True
            )
            thread.start()
        except (OSError, RuntimeError):  # no thread can be started, or the other end is gone
            connection.close()
            self._free.release()

    def _answered(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                self._answer(connection)
        finally:
            self._free.release()

    def _drop(self, stranger: _Stranger) -> None:
        if stranger.connection in self._strangers:
            self._forget(stranger)
            stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)


def connect(address: tuple[str, int], secret: bytes, deadline: float) -> socket.socket:
    """Connect to a TrustedServer before ``deadline``, a time of ``time.monotonic()``.

    Raises UntrustedError if the server does not know the secret, TimeoutError if it does not answer in time, and
    OSError if nothing listens there or the server keeps closing the connection.
    """
    pause_s = FIRST_PAUSE_S
    for left in reversed(range(ATTEMPTS)):
        connection = socket.create_connection(address, remaining_s(deadline))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _prove(connection, secret, deadline)
        except (UntrustedError, TimeoutError):
            connection.close()
            raise
        except ConnectionError:  # a busy server closes those that it has no room for
            connection.close()
            if not left:
                raise
            time.sleep(min(pause_s, remaining_s(deadline)))
            pause_s *= 2
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise AssertionError("unreachable")


def _prove(connection: socket.socket, secret: bytes, deadline: float) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonces = bytes(receive_exactly(connection, NONCE_BYTES, deadline)) + nonce
    connection.sendall(nonce + _proof(secret, b"client", nonces))
    proof = receive_exactly(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"server", nonces)):
        raise UntrustedError("the server does not know the job's secret")


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, side + nonces, "sha256")


def receive_exactly(connection: socket.socket, size_bytes: int, deadline: float) -> bytearray:
    """Receive ``size_bytes``. Raises TimeoutError past ``deadline``, ConnectionError if the connection ends."""
    received = bytearray(size_bytes)
    view, place = memoryview(received), 0
    while place < size_bytes:
        connection.settimeout(remaining_s(deadline))
        count = connection.recv_into(view[place:])
        if not count:
            raise ConnectionError("the other end closed the connection")
        place += count
    return received


def remaining_s(deadline: float) -> float:
    """Seconds until ``deadline``. Raises TimeoutError if it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s
