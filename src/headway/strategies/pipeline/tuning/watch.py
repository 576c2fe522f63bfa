"""What a rank sees of its own steps: when passes run, when messages are sent, and when they arrive.

Receives are waited for on a thread of their own for each sender, so that an arrival is seen when it comes and not when
the message is needed.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch.distributed as dist

from headway.scheduling.pipeline.program import Message
from headway.scheduling.pipeline.schedule import Action
from headway.strategies.pipeline.tuning.observed import RankStep, Span

_Asked = tuple[Sequence[dist.Work], "Future[int]"]


class StepWatch:
    """Notes one step after the other; ``offset_ns`` brings this rank's clock onto rank 0's."""

    def __init__(self) -> None:
        self.offset_ns = 0
        self._arrivals_from: dict[int, _Arrivals] = {}
        self._ended_ns = 0
        self._begin()

    def _begin(self) -> None:
        self._begin_ns = self._between_ns = 0
        self._passes: dict[Action, Span] = {}
        self._sent_ns: dict[Message, int] = {}
        self._posted_ns: dict[Message, int] = {}
        self._arrivals: dict[Message, Future[int]] = {}

    def called(self) -> None:
        """The script asks for a step: until now the rank did other things than the last one."""
        self._between_ns = time.monotonic_ns() - self._ended_ns if self._ended_ns else 0

    def begins(self) -> None:
        """The program of a step begins."""
        self._begin_ns = time.monotonic_ns()

    def computed(self, action: Action, compute: Callable[[], None]) -> None:
        """Have ``action`` computed."""
        begin_ns = time.monotonic_ns()
        compute()
        self._passes[action] = Span(begin_ns, time.monotonic_ns())

    def sending(self, message: Message) -> None:
        """A send is about to begin."""
        self._sent_ns[message] = time.monotonic_ns()

    def posted(self, message: Message, works: Sequence[dist.Work]) -> None:
        """A receive has been posted."""
        self._posted_ns[message] = time.monotonic_ns()
        if message.sender not in self._arrivals_from:
            self._arrivals_from[message.sender] = _Arrivals()
        self._arrivals[message] = self._arrivals_from[message.sender].of(works)

    def wait(self, message: Message) -> None:
        """Wait until a message has arrived. Raises what waiting for it raised."""
        self._arrivals[message].result()

    def ended(self) -> RankStep:
        """The step that has just ended."""
        self._ended_ns = time.monotonic_ns()
        offset_ns = self.offset_ns
        step = RankStep(
            self._begin_ns + offset_ns,
            self._ended_ns + offset_ns,
            self._between_ns,
            {
                action: Span(span.begin_ns + offset_ns, span.end_ns + offset_ns)
                for action, span in self._passes.items()
            },
            {message: sent_ns + offset_ns for message, sent_ns in self._sent_ns.items()},
            {
                message: Span(posted_ns + offset_ns, self._arrivals[message].result() + offset_ns)
                for message, posted_ns in self._posted_ns.items()
            },
        )
        self._begin()
        return step


class _Arrivals:
    """Waits for one sender's messages, in their order, on a thread that ends with this object."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        threading.Thread(target=_wait, args=(self._asked,), name="headway-arrivals", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def of(self, works: Sequence[dist.Work]) -> Future[int]:
        """When what ``works`` receive has arrived, or what waiting for it raises."""
        future: Future[int] = Future()
        self._asked.put((works, future))
        return future


def _wait(asked: queue.SimpleQueue[_Asked | None]) -> None:
    while (one := asked.get()) is not None:
        works, future = one
        try:
            for work in works:
                work.wait()
            future.set_result(time.monotonic_ns())
        except Exception as failure:  # raised again where the message is needed
            future.set_exception(failure)
