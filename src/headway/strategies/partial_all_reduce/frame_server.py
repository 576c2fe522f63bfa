"""FrameServer: a port that whoever knows the job's secret may connect to, a thread a connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from headway.coordination.transport import format_address
from headway.rpc.trusted import TrustedServer


class FrameServer:
    """Has ``answer`` called with every connection to ``address``, on a thread of its own, until that ends.

    Raises OSError where it cannot listen on ``host``.
    """

    def __init__(
        self, host: str, secret: bytes, answer: Callable[[socket.socket], None], *, capacity: int, name: str
    ) -> None:
        self._answer = answer
        self._connections: set[socket.socket] = set()
        self._server = TrustedServer(host, secret, self._kept, capacity=capacity, name=name)
        self.address = format_address(host, self._server.port)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _kept(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections.add(connection)
        try:
            self._answer(connection)
        finally:
            self._connections.discard(connection)
