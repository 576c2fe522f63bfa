"""Asking: questions of one engine to its peers, whose failures end training, and waits for what peers ask about."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from headway.errors import HeadwayError, UnsupportedError
from headway.strategies.decoupled.condition import Condition
from headway.strategies.decoupled.messages import Answer, Limits
from headway.strategies.decoupled.peers import Peers

POLL_S = 0.001


class Asking:
    """What the parts of an engine ask ``peers``."""

    def __init__(self, peers: Peers, condition: Condition) -> None:
        self._peers = peers
        self._condition = condition

    def ask_all(self, request: Mapping[str, Any], limits: Callable[[int], Limits]) -> dict[int, Answer]:
        """Ask every other rank, for at most its limits. Raises CommunicationError where one fails, and ever after."""
        try:
            return self._peers.ask_all(request, limits)
        except HeadwayError as error:
            self._condition.failure = error
            raise

    def until(self, holds: Callable[[], bool]) -> None:
        """Return when ``holds`` is true, which a peer asked about. Raises UnsupportedError where it never is."""
        deadline = time.monotonic() + self._peers.timeout_s
        while not holds():
            if self._condition.failure is not None or self._condition.closed or time.monotonic() > deadline:
                raise UnsupportedError("a rank did not reach the point that another rank asked about")
            time.sleep(POLL_S)
