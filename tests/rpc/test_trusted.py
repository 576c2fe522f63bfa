"""Trusted connections: who knows the secret is served, whoever else there is."""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from headway.rpc import trusted
from headway.rpc.trusted import NONCE_BYTES, TrustedServer, UntrustedError, connect, receive_exactly

pytestmark = pytest.mark.timeout(60)
SECRET = b"s" * trusted.SECRET_BYTES
STRANGERS = 200
LONG_S = 30.0


def _echo(connection: socket.socket) -> None:
    while word := connection.recv(1):
        connection.sendall(word)


Serve = Callable[..., TrustedServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes servers on the loopback that send back what they get."""
    with ExitStack() as stack:

        def made(secret: bytes = SECRET, capacity: int = 4) -> TrustedServer:
            server = TrustedServer("127.0.0.1", secret, _echo, capacity=capacity, name="test-server")
            stack.callback(server.close)
            return server

        yield made


def _reach(server: TrustedServer, secret: bytes = SECRET) -> socket.socket:
    return connect(("127.0.0.1", server.port), secret, time.monotonic() + LONG_S)


def _raw(server: TrustedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), LONG_S)


def _served(server: TrustedServer) -> bool:
    with _reach(server) as connection:
        connection.sendall(b"x")
        return receive_exactly(connection, 1, time.monotonic() + LONG_S) == b"x"


def _threads() -> int:
    return sum(thread.name.startswith("test-server") for thread in threading.enumerate())


def test_who_knows_the_secret_is_served_by_who_knows_it(serve: Serve) -> None:
    assert _served(serve())


@pytest.mark.parametrize("proof", [bytes(trusted.PROOF_BYTES), None], ids=["zeros", "another secret"])
def test_a_stranger_gets_a_nonce_and_nothing_else(serve: Serve, proof: bytes | None) -> None:
    server = serve()
    with _raw(server) as connection:
        nonce = bytes(receive_exactly(connection, NONCE_BYTES, time.monotonic() + LONG_S))
        own = bytes(NONCE_BYTES)
        made = hmac.digest(b"t" * 32, b"client" + nonce + own, "sha256") if proof is None else proof
        connection.sendall(own + made + b"x")
        assert _ended_with(connection) == b""
    assert _served(server)


def test_a_proof_that_is_sent_back_to_its_server_is_none(serve: Serve) -> None:
    """Neither what another connection saw nor the other side's proof will do."""
    server = serve()
    with _raw(server) as connection:
        nonce = bytes(receive_exactly(connection, NONCE_BYTES, time.monotonic() + LONG_S))
        own = bytes(NONCE_BYTES)
        connection.sendall(own + hmac.digest(SECRET, b"server" + nonce + own, "sha256"))
        assert _ended_with(connection) == b""


def _ended_with(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_an_impostor_is_refused_and_told_nothing() -> None:
    """It knows how to talk and takes any proof, but not the secret."""
    heard: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(NONCE_BYTES))
                receive_exactly(connection, 64, time.monotonic() + LONG_S)
                connection.sendall(bytes(trusted.PROOF_BYTES))
                heard.append(_ended_with(connection))

        impostor = threading.Thread(target=pretend)
        impostor.start()
        with pytest.raises(UntrustedError, match="does not know the job's secret"):
            connect(listener.getsockname(), SECRET, time.monotonic() + LONG_S)
        impostor.join(LONG_S)
    assert heard == [b""]


def test_silent_connections_hold_no_threads_and_keep_nobody_out(serve: Serve) -> None:
    server = serve()
    with ExitStack() as stack:
        for _ in range(STRANGERS):
            stack.enter_context(_raw(server))
        assert _threads() == 1
        assert _served(server)


def test_the_oldest_stranger_makes_room(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "MAX_STRANGERS", 8)
    server = serve()
    with ExitStack() as stack:
        silent = [stack.enter_context(_raw(server)) for _ in range(20)]
        assert _served(server)
        receive_exactly(silent[0], NONCE_BYTES, time.monotonic() + LONG_S)
        assert _ended_with(silent[0]) == b""


def test_who_says_nothing_is_let_go_after_a_while(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted, "HANDSHAKE_S", 0.2)
    with _raw(serve()) as silent:
        silent.sendall(b"half a non")
        receive_exactly(silent, NONCE_BYTES, time.monotonic() + LONG_S)
        assert _ended_with(silent) == b""


def test_no_more_are_answered_at_once_than_there_is_room_for(serve: Serve) -> None:
    server = serve(capacity=1)
    with _reach(server) as first:
        with pytest.raises(ConnectionError):
            _reach(server)
        assert _threads() == 2
        first.sendall(b"y")
        assert receive_exactly(first, 1, time.monotonic() + LONG_S) == b"y"
    assert _served(server), "there is room again; who comes too early asks again"


def test_a_closed_server_leaves_no_port_and_no_thread(serve: Serve) -> None:
    server = serve()
    port = server.port
    with _raw(server) as silent:
        receive_exactly(silent, NONCE_BYTES, time.monotonic() + LONG_S)
        server.close(LONG_S)
        assert _ended_with(silent) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(("127.0.0.1", port), SECRET, time.monotonic() + LONG_S)
    assert not server._thread.is_alive()


def test_a_server_that_stands_still_is_not_waited_for_for_ever() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener, pytest.raises(TimeoutError):
        connect(listener.getsockname(), SECRET, time.monotonic() + 0.2)
