"""Process groups, their stores and their ends."""

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
    """Which member of its group sent what the finished ``work`` received from anybody."""
    return int(work._source_rank())


def when_work_completes(boxed: Any, callback: Callable[[], None]) -> None:
    """Call ``callback`` when a boxed work is done, on whichever thread completes it."""
    dist.Work.unbox(boxed).get_future().then(lambda _: callback())


def wait_for_work(boxed: Any) -> None:
    """Return when a boxed work is done."""
    dist.Work.unbox(boxed).wait()


LIMIT_S = 30.0
"""In which the store answers what it knows, on a very busy machine, too."""
SHORT_LIMIT_S = 5.0
"""The same for what only improves the message of a failure."""

_stores = cast(Any, dist)  # its stores are public, and missing from its annotations
_deadlines: dict[
    threading.Thread, float
] = {}  # of what is asked at the moment; no lock, as signal handlers ask, too


# The job's key-value store, with a limit on every operation.
#
# A client of ``TCPStore`` sends its request and then reads the answer without any limit: where the process that keeps the
# store is stopped, or its host is cut off, no operation ever returns, and no other of the same client begins. So each
# runs on a thread of its own, which is given up where it outlasts its limit.


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


def uses_file_store() -> bool:
    """Whether the default group met in a file: its store's operations never end where the file's folder is gone."""
    return dist.is_initialized() and isinstance(without_prefixes(_get_default_store()), _stores.FileStore)


def without_prefixes(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, _stores.PrefixStore):
        store = store.underlying_store
    return store


GLOO_S = 0.2  # what its threads need at the most, unless the machine is very busy


def process_group(boxed: Any) -> dist.ProcessGroup:
    """A process group as operators are handed it."""
    return dist.ProcessGroup.unbox(boxed)


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of ``group``, for tensors on the CPU where it takes them, or None where it cannot be learned."""
    for kind in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
            return timeout
    return None


def sum_on_backend(operand: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum a tensor on the CPU over the ranks of ``group``, in place.

    This and the two below call the backend straight, and not through the dispatcher, so that it is entered without the
    interpreter's lock even where kernels of Python lie over its operations. A thread of Gloo that lets go of the last
    reference to a tensor which Python has seen waits for that lock, and holds its queue's meanwhile.
    """
    _backend_of(group).allreduce([operand], dist.AllreduceOptions()).wait()


def gather_on_backend(gathered: torch.Tensor, operand: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's ``operand``, behind each other, into ``gathered``."""
    _backend_of(group)._allgather_base(gathered, operand).wait()


def exchange_on_backend(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Equal shares of ``sent`` to all ranks, and theirs into ``received``."""
    _backend_of(group).alltoall_base(received, sent, [], []).wait()


def _backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The lower-case name of the backend that ``group`` has for each type of device, such as "nccl" for "cuda"."""
    config = torch.distributed.distributed_c10d.get_backend_config(group)
    return dict(pair.split(":") for pair in config.split(","))


def group_name(group: dist.ProcessGroup) -> str:
    """The name of ``group``, the same on all of its ranks."""
    return str(group.group_name)


def gloo_devices(group: dist.ProcessGroup) -> list[Any]:
    """The network devices of ``group``, each with a thread that serves its connections; none without Gloo."""
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
    """A new group over Gloo for one collective at a time, on the ``devices`` of another group. Collective.

    ``local`` says that only ``ranks`` make it, and not all ranks of the job.

    ``new_group("gloo")`` gives each group a device with a thread that wakes a hundred times a second, and two threads
    for collectives. So the group is made by a backend of our own, which is registered only meanwhile: others may look
    at which backends there are.
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
    """Name a group that only its own ranks make by how many they have made before.

    torch counts the groups that a process has at the moment: ranks that have given back others do not meet, and a name
    that is used again finds what the store has kept of the first group.
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
    """A network device of Gloo on the address ``host`` of this machine, with a thread that serves its connections."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=host)


def gloo_context(store: Any, rank: int, size: int, device: Any, timeout: timedelta) -> Any:
    """Connections of ``size`` processes that meet in ``store``, no process group of torch's lists: a Gloo backend.

    ``timeout`` bounds each wait for one peer, here too. Raises RuntimeError, and what ``store`` raises.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, timeout
    return gloo(store, rank, size, options)


def abort_group(group: dist.ProcessGroup) -> None:
    """Close the connections of ``group``, so that peers waiting on this rank fail rather than wait."""
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
    """Give Gloo's threads a moment of the interpreter; to be called before a process group is destroyed.

    torch joins these threads without letting go of the interpreter, and a thread that drops the tensors of a
    finished collective needs it: a group destroyed right after a collective can hang or abort.
    """
    time.sleep(GLOO_S)


@functools.cache
def let_gloo_finish_before_shutdown() -> None:
    """From now on, before groups are destroyed and before Python ends.

    A script that ends right after a collective aborts otherwise where it still has its group: a thread of Gloo that
    asks for the interpreter once Python is going is ended in a place that must not be left.
    """
    ended_s = -GLOO_S

    def before_a_group_goes(_group: dist.ProcessGroup) -> None:
        nonlocal ended_s
        if time.monotonic() - ended_s > GLOO_S:  # once for groups that go together
            let_gloo_finish()
            ended_s = time.monotonic()

    before_group_shutdown(before_a_group_goes)
    atexit.register(let_gloo_finish)
