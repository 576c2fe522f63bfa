"""What workers are told, held back until the journal is on the disk where it has to be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headway.coordination.messages import AnyToWorker
from headway.coordination.service.stream import Stream


class Outbox:
    """Passes messages on to streams in order; those said after ``hold`` wait for the next ``sync`` to end.

    Decisions that are made while another sync takes place share the next.
    """

    def __init__(self, sync: Callable[[], None], synced: Callable[[float], None]) -> None:
        self._sync, self._synced = sync, synced
        self._held: list[tuple[Stream, AnyToWorker]] = []
        self._holds = False
        self._wanted = asyncio.Event()
        self.is_syncing = False

    def say(self, stream: Stream, message: AnyToWorker) -> None:
        """Tell a worker something, after all that was said before."""
        if self._holds:
            self._held.append((stream, message))
        else:
            stream.say(message)

    def hold(self) -> None:
        """What is said from now on may be heard only once the journal is on the disk."""
        self._holds = True
        self._wanted.set()

    async def run(self) -> None:
        """Sync whenever it is wanted. Raises OSError where that fails."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            ready, self._held = self._held, []
            self.is_syncing = True
            begun = time.monotonic()
            try:
                await asyncio.to_thread(self._sync)
            finally:
                self.is_syncing = False
            self._synced(time.monotonic() - begun)
            self._pass_on(ready)
            if not self._wanted.is_set():
                ready, self._held = self._held, []
                self._holds = False
                self._pass_on(ready)

    @staticmethod
    def _pass_on(ready: list[tuple[Stream, AnyToWorker]]) -> None:
        for stream, message in ready:
            stream.say(message)
