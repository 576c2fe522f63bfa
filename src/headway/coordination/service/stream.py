"""The server's end of one worker's connection: what is to be sent, in order and bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from headway.coordination.messages import AnyToWorker

MAX_UNSENT = 1024


class Refusal(NamedTuple):
    """Why a connection is closed: a status of gRPC by name, and words."""

    status: str
    words: str


class RefusedError(Exception):
    """A connection is not served on."""

    def __init__(self, status: str, words: str) -> None:
        super().__init__(words)
        self.refusal = Refusal(status, words)


class Stream:
    """Messages on their way to one worker. ``worker`` is None until it has said who it is."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self._unsent: deque[AnyToWorker] = deque()
        self._changed = asyncio.Event()
        self._closed: Refusal | None = None

    def say(self, message: AnyToWorker) -> None:
        """Send a message. A worker that reads too slowly loses its connection."""
        if len(self._unsent) >= MAX_UNSENT:
            self.close("RESOURCE_EXHAUSTED", "the worker does not read what it is sent")
            return
        self._unsent.append(message)
        self._changed.set()

    def close(self, status: str, words: str) -> None:
        """Close it, after what was said before."""
        self._closed = self._closed or Refusal(status, words)
        self._changed.set()

    async def next(self) -> AnyToWorker:
        """The next message. Raises RefusedError once it is closed and everything was sent."""
        while not self._unsent:
            if self._closed:
                raise RefusedError(*self._closed)
            self._changed.clear()
            await self._changed.wait()
        return self._unsent.popleft()
