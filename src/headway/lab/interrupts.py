"""Signals that the launcher gets, and the ranks are to have."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def forwarding(control: socket.socket) -> Iterator[None]:
    """Pass signals on over ``control``, one byte each, for as long as the block runs; from the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, _: object) -> None:
        with suppress(OSError):
            control.send(bytes([number]))

    heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
