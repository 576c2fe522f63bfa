"""The thread on which this process talks to coordinators: one event loop for all of them.

grpc.aio serves one event loop of a process well; with several, it logs errors that are none.
"""

from __future__ import annotations

import asyncio
import os
import threading

from headway.errors import UnsupportedError

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0


def loop() -> asyncio.AbstractEventLoop:
    """The event loop, which runs on a daemon thread.

    Raises UnsupportedError in a process that was forked from one that has such a loop: gRPC does not work there.
    """
    global _loop, _owner
    with _lock:
        if _loop is not None and _owner != os.getpid():
            raise UnsupportedError(
                "a coordinator is used in a process that was forked from one that uses it",
                fix="Start the process with the method spawn.",
            )
        if _loop is None:
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="headway-coordination", daemon=True).start()
        return _loop
