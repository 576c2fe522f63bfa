"""The job's key-value store, with a limit on every operation.

A client of ``TCPStore`` sends its request and then reads the answer without any limit: where the process that keeps the
store is stopped, or its host is cut off, no operation ever returns, and no other of the same client begins. So each
runs on a thread of its own, which is given up where it outlasts its limit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from headway.errors import CommunicationError

LIMIT_S = 30.0
"""In which the store answers what it knows, on a very busy machine, too."""
SHORT_LIMIT_S = 5.0
"""The same for what only improves the message of a failure."""

_stores = cast(Any, dist)  # its stores are public, and missing from its annotations
_deadlines: dict[
    threading.Thread, float
] = {}  # of what is asked at the moment; no lock, as signal handlers ask, too


class JobStore:
    """The store of the default process group: its own methods, each of which ends within ``limit_s`` seconds.

    ``wait``, and ``get`` of a key that is not there, may take what they are allowed to wait for the key besides. All
    raise CommunicationError, which names the keeper, where the store does not answer in time, and pass on what the
    store itself raises.
    """

    def __init__(self, store: Any, limit_s: float = LIMIT_S) -> None:
        self._store, self._limit_s = store, limit_s

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits for it as long as the store's own timeout."""
        return bytes(self._ask(lambda: self._store.get(key), self._store.timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are set."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``; returns the sum."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` where it is ``expected``, or unset and that empty; returns what it is then."""
        return bytes(self._ask(lambda: self._store.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; returns whether it was there."""
        return bool(self._ask(lambda: self._store.delete_key(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Return when all ``keys`` are set; raises what the store raises after ``timeout``."""
        self._ask(lambda: self._store.wait(list(keys), timeout), timeout)

    @property
    def is_kept_by_rank_0(self) -> bool:
        """Whether it goes with rank 0, rather than with the launcher of host 0."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"

    def _ask(self, operation: Callable[[], Any], patience: timedelta = timedelta()) -> Any:
        before = list(_deadlines.values())  # a client does one thing after the other
        now = time.monotonic()
        if any(now > deadline for deadline in before):
            raise self._silent(self._limit_s)
        allowed_s = self._limit_s + patience.total_seconds()
        answers: list[Any] = []
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(operation())
            except BaseException as failure:
                failures.append(failure)
            finally:
                _deadlines.pop(thread, None)

        thread = threading.Thread(target=ask, daemon=True, name="headway-store")
        deadline = _deadlines[thread] = max([now, *before]) + allowed_s
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            _deadlines.pop(thread)
            return operation()
        thread.join(deadline - now)
        if failures:
            raise failures[0]
        if not answers:
            raise self._silent(allowed_s)
        return answers[0]

    def _silent(self, waited_s: float) -> CommunicationError:
        return CommunicationError(
            f"{self._keeper()}, which keeps the job's store, does not answer within {waited_s:g} s: it is stopped or "
            "cut off. Restart the job from its last checkpoint."
        )

    def _keeper(self) -> str:
        store = without_prefixes(self._store)
        where = f" at {store.host}:{store.port}" if isinstance(store, _stores.TCPStore) else ""
        return f"{'rank 0' if self.is_kept_by_rank_0 else 'the launcher of host 0'}{where}"


def default_store(limit_s: float = LIMIT_S) -> JobStore:
    """The key-value store of the default process group; each operation raises after ``limit_s`` seconds."""
    return JobStore(_get_default_store(), limit_s)


def kept_in_a_file() -> bool:
    """Whether the default group met in a file: its store's operations never end where the file's folder is gone."""
    return dist.is_initialized() and isinstance(without_prefixes(_get_default_store()), _stores.FileStore)


def without_prefixes(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    return store
