"""gRPC channel and server options that workers and their coordinator share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from headway.errors import UserError, how_to_install
from headway.rpc.interface import format_address, is_loopback
from headway.strategies.partial_all_reduce.coordinator.messages import (
    MAX_TO_COORDINATOR_BYTES,
    MAX_TO_WORKER_BYTES,
)

if TYPE_CHECKING:
    import grpc.aio

SERVICE = "headway.Coordinator"
METHOD = "Connect"
SERVER_NAME = "headway-coordinator"
"""The name in the certificates of coordinators."""
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
PINGS_NOT_BEFORE_MS = 10_000
MAX_RECONNECT_MS = 1_000

Options = list[tuple[str, Any]]


def require_grpc() -> None:
    """Raise UserError if gRPC is not installed."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it would report each connection that fails to stderr
    # Its own support of forks starts threads in each forked process, such as a data loader's, and they crash there.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        import grpc.aio  # noqa: F401
    except ImportError:
        raise missing("grpcio") from None


def missing(library: str) -> UserError:
    """Return the error for a missing library of the extra."""
    return UserError(
        f"the coordinator needs {library}, which is not installed",
        fix=f"Run: {how_to_install('coordination')}.",
    )


def parse_address(text: str, what: str = "the coordinator's address") -> tuple[str, int]:
    """Parse HOST:PORT or [HOST]:PORT. Raises UserError if ``text`` is invalid."""
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not separator or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{what} is invalid", got=text, expected="HOST:PORT, with IPv6 addresses in brackets")
    return host, int(port)


def is_local(host: str) -> bool:
    """Whether ``host`` is reachable from this machine only."""
    return host == "localhost" or is_loopback(host)


def check_secret(host: str, secret: bytes | None) -> None:
    """Raise UserError if a non-loopback address is used without a secret."""
    if secret is None and not is_local(host):
        raise UserError(
            "a coordinator on a non-loopback address needs a secret", got=host,
            expected="a loopback address, or a secret",
            fix="Create one with: headway coordinate --new-secret FILE, and copy it to every worker.",
        )  # fmt: skip


def server_options(handshake_s: float, idle_s: float, max_connections: int) -> Options:
    """Return the server options; idle or silent connections are closed."""
    return [
        (
            "grpc.so_reuseport",
            0,
        ),  # a second coordinator on the port fails, and does not get half of the workers
        ("grpc.max_receive_message_length", MAX_TO_COORDINATOR_BYTES),
        ("grpc.max_send_message_length", MAX_TO_WORKER_BYTES),
        ("grpc.max_metadata_size", 4096),
        ("grpc.absolute_max_metadata_size", 8192),
        ("grpc.max_concurrent_streams", 2),  # the one in use, and its successor
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", int(handshake_s * 1000)),
        ("grpc.max_connection_idle_ms", int(idle_s * 1000)),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", PINGS_NOT_BEFORE_MS),
    ]


def client_credentials(secret: bytes | None) -> grpc.ChannelCredentials | None:
    """Return TLS credentials that authenticate worker and coordinator; None without a secret.

    Raises UserError if cryptography is not installed.
    """
    if secret is None:
        return None
    from headway.strategies.partial_all_reduce.coordinator import security

    return security.client_credentials(secret)


def channel(host: str, port: int, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Open a channel to a coordinator with ``client_credentials``. It connects on first use."""
    import grpc.aio

    options: Options = [
        (
            "grpc.use_local_subchannel_pool",
            1,
        ),  # workers of one process, as in tests, do not share a connection
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", MAX_TO_WORKER_BYTES),
        ("grpc.max_send_message_length", MAX_TO_COORDINATOR_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]
    target = format_address(host, port)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    options.append(("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.aio.secure_channel(target, credentials, options)
