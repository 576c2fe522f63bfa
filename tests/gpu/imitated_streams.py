"""The stream transport without a GPU: imitated streams, with every missing wait found.

Loaded in a rank before a case, this lets ``DecoupledDataParallel`` take its path for NCCL with tensors in memory, where
Gloo's own reduce-scatter and all-gather stand in for NCCL's. Streams are imitated: work is done at once, but who waits
for whom is noted in vector clocks, and every operation on a tensor must come behind the last ones on its memory that it
is in conflict with, by the waits alone. Memory that goes out of use while another stream than the one that allocated it
may still be at work on it is found as well, unless it was recorded there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.behaviour.decoupled import job
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]


class RaceError(Exception):
    """Two streams use the same memory in no order."""


@dataclass
class Memory:
    """What has been done with one storage."""

    reference: Any
    owner: int
    written: tuple[int, int, str] = (0, 0, "")
    read: dict[int, tuple[int, str]] = field(default_factory=dict)
    lent_to: set[int] = field(default_factory=set)


class Imitation:
    """All streams of a process. Stream 0 is the default one."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {0: {0: 1}}
        self.local = threading.local()
        self.memories: dict[int, Memory] = {}
        self.reached: Clock = {}  # what the host has waited for: memory that it frees then is free
        self.shared: set[int] = set()  # those that another stream than their owner has used
        self.looks = 0

    @property
    def current(self) -> int:
        return int(getattr(self.local, "stream", 0))

    def new(self) -> int:
        stream = len(self.clocks)
        self.clocks[stream] = {stream: 1}
        return stream

    def merge(self, clock: Clock) -> None:
        mine = self.clocks[self.current]
        for stream, time in clock.items():
            mine[stream] = max(time, mine.get(stream, 0))

    def use(self, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        stream = self.current
        if key not in self.memories:
            self.memories[key] = Memory(StorageWeakRef(storage), stream)
        memory, clock = self.memories[key], self.clocks[stream]
        if stream != memory.owner:
            self.shared.add(key)
        others = [memory.written]
        if writes:
            others += [(reader, time, by) for reader, (time, by) in memory.read.items()]
        for other, time, by in others:
            if time > clock.get(other, 0):
                raise RaceError(f"{what} on stream {stream} does not wait for {by} on stream {other}")
        clock[stream] += 1
        if writes:
            memory.written, memory.read = (stream, clock[stream], what), {}
        else:
            memory.read[stream] = (clock[stream], what)

    def look_for_freed(self) -> None:
        self.looks += 1
        if self.looks % 8:
            return
        for key in list(self.memories if self.looks % 5000 == 0 else self.shared):
            memory = self.memories[key]
            if not memory.reference.expired():
                continue
            del self.memories[key]
            self.shared.discard(key)
            clock = self.clocks[memory.owner]
            for stream, time, by in [memory.written, *((s, t, b) for s, (t, b) in memory.read.items())]:
                known = max(clock.get(stream, 0), self.reached.get(stream, 0))
                if time > known and stream not in memory.lent_to:
                    raise RaceError(
                        f"memory of stream {memory.owner} is free before {by} on stream {stream} is done"
                    )


IMITATION = Imitation()
Imitated: Any = None  # the class of streams, once Headway has been imported


class Watch(TorchDispatchMode):
    """Tells the imitation of every operation on tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        IMITATION.look_for_freed()
        result = func(*args, **kwargs)
        arguments = list(zip(func._schema.arguments, args, strict=False))
        arguments += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        shape_only = func._schema.name.endswith("_like") or "::new_" in func._schema.name
        for argument, value in arguments if not is_view and not shape_only else []:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                IMITATION.use(tensor, writes=writes, what=str(func))
        if not is_view:
            for tensor in _tensors(result):
                if tensor.untyped_storage()._cdata not in IMITATION.memories:
                    IMITATION.use(tensor, writes=True, what=str(func))
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class Mark:
    """An event."""

    def __init__(self) -> None:
        self.clock = dict(IMITATION.clocks[IMITATION.current])

    def query(self) -> bool:
        return False  # the worst case: the device is far behind

    def synchronize(self) -> None:
        IMITATION.merge(self.clock)
        for stream, time in self.clock.items():
            IMITATION.reached[stream] = max(time, IMITATION.reached.get(stream, 0))


def install() -> None:
    import torch.distributed as dist

    from headway import torch_private
    from headway.strategies.decoupled import wrapper
    from headway.strategies.live.channels import stream_channels, streams, wiring

    class Imitated(streams.Streams):
        def __init__(self, device: torch.device, asynchronous: bool = False) -> None:
            super().__init__(device)
            self.asynchronous = asynchronous

        def new(self, priority: int = 0) -> Any:
            return IMITATION.new() if self.asynchronous else None

        @contextmanager
        def on(self, stream: Any) -> Iterator[None]:
            before, IMITATION.local.stream = IMITATION.current, stream or 0
            try:
                yield
            finally:
                IMITATION.local.stream = before

        def current(self) -> Any:
            return IMITATION.current if self.asynchronous else None

        def mark(self) -> Any:
            return Mark() if self.asynchronous else None

        def follow(self, mark: Any) -> None:
            if mark is not None:
                IMITATION.merge(mark.clock)

        def borrow(self, tensors: Any) -> None:
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in IMITATION.memories:
                    IMITATION.memories[key].lent_to.add(IMITATION.current)

    globals()["Imitated"] = Imitated
    cpu = torch.device("cpu")

    def wiring_of(device: torch.device, group: dist.ProcessGroup) -> wiring.Wiring:
        return wiring.Wiring(device, True, cpu, Imitated(device, True))

    def groups_of_our_own(group: Any, wired: Any, channels: int) -> Any:
        native = tuple(wiring._new_group(group, "gloo") for _ in range(channels))
        return wiring.OwnGroups(host=(wiring._new_group(group, "gloo"),), native=native)

    replaced: Any = wrapper
    replaced.wiring_of = wiring_of
    replaced.groups_of_our_own = groups_of_our_own
    replaced = stream_channels
    replaced.wait_on_host = lambda _stream: None  # a stream of the imitation is a number

    @contextmanager
    def seen() -> Iterator[None]:
        """In the place of ``without_user_modes``, which would hide what is done from the watch."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            yield

    torch_private.without_user_modes = seen
    watch: Any = Watch
    watch().__enter__()


_wrap = job.wrap
_installed: list[bool] = []


def _wrap_with_imitated_streams(module: Any, mode: str, **options: Any) -> Any:
    if mode in (job.GRADIENTS, job.PARAMETERS) and not _installed:
        _installed.append(True)
        install()
    return _wrap(module, mode, **options)


job.wrap = _wrap_with_imitated_streams
