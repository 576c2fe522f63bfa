"""The port of a coordinator: who may talk to it, what it reads, and who loses its connection."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests import limits
from tests.strategies.partial_all_reduce.coordinator.simple_generators import All
from tests.strategies.partial_all_reduce.server_thread import ServerThread

from headway.errors import CommunicationError, UserError
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.coordinator.messages import MAX_TO_COORDINATOR_BYTES, Member
from headway.strategies.partial_all_reduce.coordinator.options import ServiceOptions
from headway.strategies.partial_all_reduce.coordinator.prometheus import (
    MAX_REPORTED_NAMES,
    MetricsPort,
    PrometheusObserver,
)
from headway.strategies.partial_all_reduce.coordinator.security import identity, read_secret, write_secret
from headway.strategies.partial_all_reduce.coordinator.transport import SERVER_NAME, parse_address

LONG_S = 30.0
SECRET, OTHER = b"a" * 64, b"b" * 64
HELLO = {
    "kind": "hello", "protocol": 1, "session": "0" * 32,
    "member": {"worker": 0, "incarnation": 0, "address": "a:1", "host": "a"},
}  # fmt: skip


def served(**options: Any) -> Iterator[str]:
    server = ServerThread(lambda _: All(), "all", ServiceOptions(**options))
    yield server.address
    server.close()


@pytest.fixture
def address() -> Iterator[str]:
    yield from served(handshake_s=0.5, idle_s=1.0, max_workers=2)


@pytest.fixture
def patient() -> Iterator[str]:
    yield from served(handshake_s=LONG_S, idle_s=LONG_S, max_workers=2)


@pytest.fixture
def secured() -> Iterator[str]:
    yield from served(secret=SECRET, handshake_s=0.5)


def join(address: str, secret: bytes | None, limit_s: float, worker: int = 0) -> CoordinatorClient:
    client = CoordinatorClient(address, secret)
    client.join(Member(worker, 0, "a:1", "a"), limit_s)
    return client


def said(
    address: str, messages: Sequence[bytes], method: str = "Connect", credentials: Any = None
) -> tuple[str, str]:
    """Status and words that a connection ends with on which these messages are sent, and nothing else."""
    import grpc

    name = [("grpc.ssl_target_name_override", SERVER_NAME)]
    with (
        grpc.secure_channel(address, credentials, name) if credentials else grpc.insecure_channel(address)
    ) as channel:
        call = channel.stream_stream(f"/headway.Coordinator/{method}")(
            iter(messages), timeout=limits.stretched(LONG_S)
        )
        try:
            for _ in call:
                pass
        except grpc.RpcError as failure:
            return failure.code().name, failure.details()
    return "OK", ""


def test_who_knows_the_secret_joins(secured: str) -> None:
    client = join(secured, SECRET, limits.stretched(LONG_S))
    assert client.is_reachable
    client.leave()


def test_who_has_another_secret_is_soon_told_so(secured: str) -> None:
    with pytest.raises(
        CommunicationError, match=r"cannot join .*: the server at this address has a different secret"
    ):
        join(secured, OTHER, 3600.0)


def test_who_has_no_secret_does_not_join(secured: str) -> None:
    with pytest.raises(
        CommunicationError, match=r"cannot join .*: Socket closed; check that it has the same secret"
    ):
        join(secured, None, 1.0)


def test_the_server_too_demands_a_proof(secured: str) -> None:
    import grpc

    own, other = identity(SECRET, server=False), identity(OTHER, server=False)
    wrong_side = identity(SECRET, server=True)
    hello = [json.dumps(HELLO).encode()]
    for key, certificate in (
        (None, None), (other.key, other.certificate), (wrong_side.key, wrong_side.certificate),
    ):  # fmt: skip
        credentials = grpc.ssl_channel_credentials(own.authority, key, certificate)
        assert said(secured, hello, credentials=credentials)[0] == "UNAVAILABLE"
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    assert said(secured, hello, credentials=credentials)[0] == "OK"


def test_workers_do_not_take_another_for_their_coordinator(address: str) -> None:
    with pytest.raises(CommunicationError, match="different secret, or none"):
        join(address, SECRET, 3600.0)


def test_other_addresses_than_loopback_need_a_secret() -> None:
    with pytest.raises(UserError, match="needs a secret"):
        ServerThread(lambda _: All(), "all", ServiceOptions(), "0.0.0.0:0")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([b"\x80\x04N."], "malformed message"),
        ([b"{"], "malformed message"),
        ([b'{"kind":"beat","number":1}'], "the first message must be hello"),
        ([json.dumps({**HELLO, "session": "x"}).encode()], "hello.session"),
        ([json.dumps({**HELLO, "more": 1}).encode()], "hello.more"),
        ([json.dumps({**HELLO, "member": {**HELLO["member"], "worker": 4096}}).encode()], "worker"),  # type: ignore[dict-item]
        ([json.dumps(HELLO).encode(), json.dumps(HELLO).encode()], "unexpected second hello"),
        (
            [json.dumps(HELLO).encode(), b'{"kind":"vote","number":-1,"key":"k","reduced":true}'],
            "vote.number",
        ),
        ([json.dumps(HELLO).encode(), b'{"kind":"beat","number":1,"metrics":{"a b":1}}'], "beat.metrics"),
        ([], "no hello message"),
    ],
)
def test_malformed_messages_end_their_connection(patient: str, messages: list[bytes], words: str) -> None:
    status, found = said(patient, messages)
    assert status == "INVALID_ARGUMENT"
    assert words in found


def test_a_connection_that_ends_while_a_message_is_in_flight_says_why(patient: str) -> None:
    # The answer to the first is being written while the second is read.
    messages = [json.dumps(HELLO).encode(), b"{"]
    assert {said(patient, messages)[0] for _ in range(50)} == {"INVALID_ARGUMENT"}
    assert {said(patient, messages[:1])[0] for _ in range(200)} == {"OK"}


def test_oversized_messages_are_not_read(address: str) -> None:
    assert said(address, [b" " * (MAX_TO_COORDINATOR_BYTES + 1)])[0] == "RESOURCE_EXHAUSTED"
    assert said(address, [json.dumps(HELLO).encode(), b"[" * (1 << 22)])[0] == "RESOURCE_EXHAUSTED"


def test_another_version_is_told_so(address: str) -> None:
    status, words = said(address, [json.dumps({**HELLO, "protocol": 99}).encode()])
    assert status == "FAILED_PRECONDITION"
    assert "incompatible versions" in words


def test_there_is_nothing_else_to_call(address: str) -> None:
    assert said(address, [], "Another")[0] == "UNIMPLEMENTED"


def test_there_is_a_limit_to_workers(address: str) -> None:
    clients = [join(address, None, limits.stretched(LONG_S), worker) for worker in range(2)]
    with pytest.raises(CommunicationError, match="already has 2 workers"):
        join(address, None, 1.0, 2)
    for client in clients:
        client.leave()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_who_says_nothing_is_dropped(secret: bytes | None) -> None:
    for address in served(secret=secret, handshake_s=0.5):
        with socket.create_connection(parse_address(address)) as connection:
            connection.settimeout(limits.stretched(LONG_S))
            while connection.recv(4096):
                pass


def test_who_opens_a_stream_and_says_nothing_is_dropped(address: str) -> None:
    import grpc

    with grpc.insecure_channel(address) as channel:
        over = threading.Event()

        def silent() -> Iterator[bytes]:
            over.wait()
            yield from ()

        call = channel.stream_stream("/headway.Coordinator/Connect")(
            silent(), timeout=limits.stretched(LONG_S)
        )
        with pytest.raises(grpc.RpcError) as failure:
            next(call)
        over.set()
    assert failure.value.details() == "no hello message"


def test_a_port_that_is_taken_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="cannot listen on"):
        ServerThread(lambda _: All(), "all", ServiceOptions(), address)


def test_a_secret_file_is_for_its_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "secret"
    secret = write_secret(path)
    assert read_secret(path) == secret.encode()
    assert not caplog.text
    with pytest.raises(UserError, match="cannot be written"):
        write_secret(path)
    path.chmod(0o644)
    read_secret(path)
    assert "chmod 600" in caplog.text
    path.write_text("password")
    with pytest.raises(UserError, match="too short"):
        read_secret(path)


def test_metrics_say_what_happens_and_stay_bounded() -> None:
    observer = PrometheusObserver()
    observer.joined(0, resumed=False)
    observer.members(1)
    observer.decided(True, 0.1, 0)
    for number in range(2 * MAX_REPORTED_NAMES):
        observer.reported(0, {f"name_{number}": float(number)})
    port = MetricsPort(observer, "127.0.0.1", 0)
    try:
        page = urlopen(f"http://127.0.0.1:{port.port}/metrics", timeout=LONG_S).read().decode()
        assert "headway_coordinator_workers 1.0" in page
        assert 'headway_coordinator_decisions_total{outcome="committed"} 1.0' in page
        assert page.count("\nheadway_worker_reported{") == MAX_REPORTED_NAMES
        assert f"headway_coordinator_reports_dropped_total {float(MAX_REPORTED_NAMES)}" in page
        observer.gone(0, "lease")
        page = urlopen(f"http://127.0.0.1:{port.port}/metrics", timeout=LONG_S).read().decode()
        assert "\nheadway_worker_reported{" not in page
    finally:
        port.close()
