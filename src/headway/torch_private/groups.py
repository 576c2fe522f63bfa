"""Private names of process groups: backends, the job's store, Gloo's threads and the shutdown of groups."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from headway.errors import CommunicationError


def source_of(work: dist.Work) -> int:
    """The group rank that sent the message of a finished receive from any source."""
    return int(work._source_rank())


def when_work_completes(boxed: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` when a boxed work is done, on the thread that completes it."""
    dist.Work.unbox(boxed).get_future().then(lambda _: callback())


def wait_for_work(boxed: Any) -> None:
    """Wait until a boxed work is done."""
    dist.Work.unbox(boxed).wait()


LIMIT_S = 30.0
"""How long the store may take to answer, even on a very busy machine."""
SHORT_LIMIT_S = 5.0
"""The same, for requests that only improve an error message."""

_stores = cast(Any, dist)  # its stores are public, and missing from its annotations
# Of the operations in progress. No lock, as signal handlers use the store too.
_deadlines: dict[threading.Thread, float] = {}


class JobStore:
    """The store of the default process group, with a time limit of ``limit_s`` seconds on every operation.

    A client of ``TCPStore`` waits for its answer without any limit: if the process that hosts the store is stopped, or
    its host is cut off, no operation returns, and no other of the same client begins. So each operation runs on its own
    thread, which is abandoned after the limit.

    ``wait``, and ``get`` of a missing key, may take their own timeout in addition. All methods raise CommunicationError
    naming the host of the store if it does not answer in time, and pass on what the store itself raises.
    """

    def __init__(self, store: Any, limit_s: float = LIMIT_S) -> None:
        self._store, self._limit_s = store, limit_s

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits for the key up to the store's own timeout."""
        return bytes(self._ask(lambda: self._store.get(key), self._store.timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` are set."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``; returns the sum."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``key`` to ``desired`` if it is ``expected``, or unset and ``expected`` empty; returns the new value."""
        return bytes(self._ask(lambda: self._store.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; returns whether it was there."""
        return bool(self._ask(lambda: self._store.delete_key(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all ``keys`` are set; raises the store's own error after ``timeout``."""
        self._ask(lambda: self._store.wait(list(keys), timeout), timeout)

    @property
    def is_kept_by_rank_0(self) -> bool:
        """Whether rank 0 hosts the store, rather than the launcher of host 0."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"

    def _ask(self, operation: Callable[[], Any], patience: timedelta = timedelta()) -> Any:
        before = list(_deadlines.values())  # a client runs one operation at a time
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
            "unreachable. Restart the job from its last checkpoint."
        )

    def _keeper(self) -> str:
        store = without_prefixes(self._store)
        where = f" at {store.host}:{store.port}" if isinstance(store, _stores.TCPStore) else ""
        return f"{'rank 0' if self.is_kept_by_rank_0 else 'the launcher of host 0'}{where}"


def default_store(limit_s: float = LIMIT_S) -> JobStore:
    """The key-value store of the default process group, with a limit of ``limit_s`` seconds on each operation."""
    return JobStore(_get_default_store(), limit_s)


def uses_file_store() -> bool:
    """Whether the default group uses a file store, whose operations hang if the file's folder is deleted."""
    return dist.is_initialized() and isinstance(without_prefixes(_get_default_store()), _stores.FileStore)


def without_prefixes(store: Any) -> Any:
    """The store inside all ``PrefixStore`` wrappers."""
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    return store


GLOO_S = 0.2  # the longest that Gloo's threads need to finish, unless the machine is very busy


def process_group(boxed: Any) -> dist.ProcessGroup:
    """The process group in a boxed operator argument."""
    return dist.ProcessGroup.unbox(boxed)


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of ``group``'s CPU backend, or else of its CUDA backend; None if unknown."""
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    return None


def sum_on_backend(operand: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum a CPU tensor over the ranks of ``group``, in place.

    This and the two functions below call the backend directly, not through the dispatcher, so that it runs without the
    GIL even if Python kernels are overlaid on its operations. Otherwise it can deadlock: a Gloo thread that drops the
    last reference to a tensor seen by Python waits for the GIL while holding its queue's lock.
    """
    _backend_of(group).allreduce([operand], dist.AllreduceOptions()).wait()


def gather_on_backend(gathered: torch.Tensor, operand: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-gather: concatenate every rank's ``operand`` into ``gathered``."""
    _backend_of(group)._allgather_base(gathered, operand).wait()


def exchange_on_backend(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """All-to-all: send equal shares of ``sent`` to all ranks, and receive theirs into ``received``."""
    _backend_of(group).alltoall_base(received, sent, [], []).wait()


def _backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The lower-case name of ``group``'s backend for each device type, such as {"cuda": "nccl"}."""
    config = torch.distributed.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":") for pair in config.split(","))


def group_name(group: dist.ProcessGroup) -> str:
    """The name of ``group``, the same on all of its ranks."""
    return str(group.group_name)


def gloo_devices(group: dist.ProcessGroup) -> list[Any]:
    """The Gloo network devices of ``group``, each with a thread that serves its connections; empty without Gloo."""
    with suppress(RuntimeError, AttributeError):
        options: Any = group._get_backend(torch.device("cpu")).options
        return list(options._devices)
    return []


def new_gloo_group(
    ranks: list[int],
    timeout: timedelta | None,
    devices: Sequence[Any],
    *,
    local: bool,
    description: str,
) -> dist.ProcessGroup:
    """Create a Gloo group that runs one collective at a time on the ``devices`` of another group.

    Collective over all ranks of the job, or only over ``ranks`` if ``local``.

    ``new_group("gloo")`` would create a device with a thread that wakes up 100 times a second, and two threads for
    collectives. So a backend of our own creates the group. It is registered only meanwhile, as other code may list the
    backends.
    """

    def make(options: Any, _backend_options: Any) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._devices, gloo_options._threads, gloo_options._timeout = (
            list(devices),
            1,
            options.timeout,
        )
        gloo_options.global_ranks_in_group, gloo_options.group_name = (
            options.global_ranks_in_group,
            options.group_id,
        )
        return gloo(options.store, options.group_rank, options.group_size, gloo_options)

    dist.Backend.register_backend(_OWN_BACKEND, make, extended_api=True, devices=["cpu"])
    try:
        with _named_by_its_ranks() if local else nullcontext():
            group = dist.new_group(
                ranks, timeout, backend=_OWN_BACKEND, use_local_synchronization=local, group_desc=description
            )
    finally:
        del dist.Backend._plugins[_OWN_BACKEND.upper()]
        dist.Backend.backend_list.remove(_OWN_BACKEND)
    assert isinstance(group, dist.ProcessGroup)
    return group


_OWN_BACKEND = "headway_gloo"
_made_by: Counter[tuple[int, ...]] = Counter()


@contextmanager
def _named_by_its_ranks() -> Iterator[None]:
    """Name a group that only its members create by its ranks and how many groups they have created.

    torch names it by the number of groups that the process has. So ranks that have destroyed groups would use different
    names, and a reused name would find the first group's keys in the store.
    """

    def named(ranks: Sequence[int], *_args: Any, **_kwargs: Any) -> str:
        members = tuple(ranks)
        _made_by[members] += 1
        return f"headway/{'_'.join(map(str, members))}/{_made_by[members]}"

    module: Any = distributed_c10d
    stock = module._process_group_name
    module._process_group_name = named
    try:
        yield
    finally:
        module._process_group_name = stock


def gloo_device(host: str) -> Any:
    """A Gloo network device on this machine's address ``host``, with a thread that serves its connections."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=host)


def gloo_context(store: Any, rank: int, size: int, device: Any, timeout: timedelta) -> Any:
    """Connect ``size`` processes through ``store`` by a Gloo backend that torch does not list as a process group.

    ``timeout`` limits each wait for a peer, during the connection too. Raises RuntimeError, and what ``store`` raises.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, timeout
    return gloo(store, rank, size, options)


def abort_group(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, so that peers waiting for this rank fail instead of waiting."""
    with suppress(RuntimeError, AttributeError):
        group.abort()


def before_group_shutdown(callback: Callable[[dist.ProcessGroup], None]) -> None:
    """Call ``callback`` with every process group just before it is shut down, from now on.

    ``destroy_process_group`` shuts groups down through this method however a script imported it.
    """
    shutdown = dist.ProcessGroup.shutdown

    @functools.wraps(shutdown)
    def shutdown_after_callback(self: dist.ProcessGroup) -> None:
        callback(self)
        shutdown(self)

    dist.ProcessGroup.shutdown = shutdown_after_callback  # type: ignore[method-assign]


def let_gloo_finish() -> None:
    """Give Gloo's threads time to acquire the GIL; call this before a process group is destroyed.

    torch joins these threads while holding the GIL, which a thread needs to free the tensors of a finished collective:
    a group destroyed right after a collective can hang or abort.
    """
    time.sleep(GLOO_S)


@functools.cache
def let_gloo_finish_before_shutdown() -> None:
    """Call ``let_gloo_finish`` before every group is destroyed and before Python exits, from now on.

    Otherwise a script that exits right after a collective, with its group alive, can abort: a Gloo thread that requests
    the GIL during Python's shutdown is terminated in code that must not be unwound.
    """
    ended_s = -GLOO_S

    def before_a_group_goes(_group: dist.ProcessGroup) -> None:
        nonlocal ended_s
        if time.monotonic() - ended_s > GLOO_S:  # once for groups that go together
            let_gloo_finish()
            ended_s = time.monotonic()

    before_group_shutdown(before_a_group_goes)
    atexit.register(let_gloo_finish)
