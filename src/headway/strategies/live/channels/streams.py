"""Streams: the order of work on a device where nothing waits on the host.

Trainers, collectives and updates give a GPU their work on streams of their own, which run side by side. Whoever needs
another's result has to wait for an event behind it: training's current stream for a collective, a collective for
every stream that filled its bucket, and whoever fills a bucket for those who still read it. On the CPU work is done
when it has been given, so there everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Streams:
    """The streams of one device. A mark is an event behind all that the current stream has been given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asynchronous = device.type == "cuda"

    def new(self, priority: int = 0) -> Any:
        """A stream of one's own; None on the CPU."""
        return torch.cuda.Stream(self.device, priority=priority) if self.asynchronous else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which ``stream`` is the current one, on its device."""
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def current(self) -> Any:
        """The current stream of this thread; None on the CPU."""
        if not self.asynchronous:
            return None
        # A device's number is looked up much faster than the device, and this is asked all the time.
        index = self.device.index
        return torch.cuda.current_stream(self.device if index is None else index)

    def mark(self) -> Any:
        """A mark on the current stream; None on the CPU."""
        return self.current().record_event() if self.asynchronous else None

    def follow(self, mark: Any) -> None:
        """Have the current stream wait for ``mark``; the host does not."""
        if mark is not None:
            self.current().wait_event(mark)

    def borrow(self, tensors: Iterable[torch.Tensor]) -> None:
        """The current stream uses memory of other streams, which may be freed before it is through."""
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(self.current())

    def carry(self, work: Callable[[], object], tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
        """``work`` for another stream: done behind what this one has been given, with ``tensors`` that it made."""
        mark = self.mark()
        if mark is None:
            return work

        def carried() -> object:
            self.follow(mark)
            self.borrow(tensors)
            return work()

        return carried


def is_reached(mark: Any) -> bool:
    """Whether the device has come to ``mark``."""
    return mark is None or bool(mark.query())


def wait_on_host(mark: Any) -> None:
    """Return when the device has come to ``mark``, or is through with a stream of its."""
    if mark is not None:
        mark.synchronize()


class BufferFence:
    """The uses of one buffer, each behind the one before on whatever streams they are.

    The buffer lies on the device or, ``on_host``, in memory that the device copies from and to.
    """

    def __init__(self, streams: Streams, *, on_host: bool) -> None:
        self._streams = streams
        self._on_host = on_host
        self._last: Any = None
        self._stream: Any = None

    def acquire(self) -> AbstractContextManager[None]:
        """What the current stream does with the buffer."""
        return self._acquire() if self._streams.asynchronous else nullcontext()

    @contextmanager
    def _acquire(self) -> Iterator[None]:
        self.join()
        try:
            yield
        finally:
            self._stream = self._streams.current()
            self._last = self._streams.mark()

    def join(self) -> None:
        """Have the current stream wait for the last use, without a use of its own."""
        if self._last is not None and self._stream != self._streams.current():
            self._streams.follow(self._last)

    def acquire_on_host(self) -> AbstractContextManager[None]:
        """What is done with the buffer where it lies: by the current stream of then, or on the host.

        On the host, the turn is taken now and waited for inside; whoever comes next has to wait for it on the host.
        """
        if not self._on_host:
            return self.acquire()
        last, self._last = self._last, None
        return nullcontext() if last is None else _behind(last)


@contextmanager
def _behind(mark: Any) -> Iterator[None]:
    wait_on_host(mark)
    yield


class CompletionEvents:
    """Which of some numbered pieces of work are done on the device, for threads that have to know."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._marks: dict[int, Any] = {}

    def reach(self, number: int) -> None:
        """The current stream has been given piece ``number``."""
        mark = self._streams.mark()
        if mark is not None:
            self._marks = {n: m for n, m in self._marks.items() if not is_reached(m)}
            self._marks[number] = mark

    def wait(self, number: int) -> None:
        """Return when piece ``number``, which was given, is done."""
        wait_on_host(self._marks.get(number))

    def is_done(self, number: int) -> bool:
        """Whether piece ``number``, which was given, is done."""
        return is_reached(self._marks.get(number))
