"""A coordinator for tests, on a thread of their process."""

from __future__ import annotations

import asyncio
from typing import Any

from headway.errors import CommunicationError
from headway.strategies.partial_all_reduce.coordinator import client
from headway.strategies.partial_all_reduce.coordinator.ledger import MakeGenerator
from headway.strategies.partial_all_reduce.coordinator.options import ServiceOptions
from headway.strategies.partial_all_reduce.coordinator.server import Server


class ServerThread:
    """A coordinator in this process, on the thread of ``background``."""

    def __init__(
        self,
        make_generator: MakeGenerator,
        description: str,
        options: ServiceOptions,
        listen: str = "127.0.0.1:0",
    ) -> None:
        self._loop = client.loop()
        self._server = Server(make_generator, description, options)
        self._run(self._server.start(listen))
        self.address = self._server.address

    def close(self) -> None:
        """End it."""
        self._run(self._server.stop())

    def _run(self, work: Any, timeout_s: float = 30.0) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError:
            raise CommunicationError("the coordinator did not answer in time") from None
