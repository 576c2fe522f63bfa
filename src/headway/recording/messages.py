"""Observes a script's point-to-point messages: ``dist.send``, ``recv``, ``isend``, ``irecv`` and batches.

All of them call methods of a process group and return works. Gloo reports a message's end only to the caller of
``wait``, so the end recorded here is when ``wait`` returns.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from headway import torch_private
from headway.recording.collectives import GroupWatch
from headway.recording.patching import Now, patch_method
from headway.recording.pipelines import Label, PipelineWatch
from headway.recording.watch import Watch
from headway.strategies.live.channels.observer import THREAD_NAME
from headway.trace.events import Event, Kind, Stream


@dataclass(slots=True)
class ObservedMessage:
    """One message of this rank. ``end_ns`` is 0 until it was waited for.

    ``peer`` and ``sequence`` are -1 while the sender is unknown.
    """

    kind: str
    group: str
    peer: int
    size_bytes: int
    step: int
    enqueue_ns: int
    label: Label
    end_ns: int = 0
    sequence: int = -1


class MessageWatch(Watch):
    """Observes the messages of this process while attached, except those of Headway's own threads."""

    def __init__(self, now: Now, groups: GroupWatch, pipelines: PipelineWatch) -> None:
        self.observed: list[ObservedMessage] = []
        self._now = now
        self._groups = groups
        self._pipelines = pipelines
        self._works: WeakKeyDictionary[Any, tuple[ObservedMessage, dist.ProcessGroup]] = WeakKeyDictionary()
        self._sequences: dict[tuple[str, str, int], int] = defaultdict(int)
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Start watching."""
        assert not self._undo
        for name, kind in (("send", Kind.SEND), ("recv", Kind.RECEIVE), ("recv_anysource", Kind.RECEIVE)):
            observe = functools.partial(self._start, kind, name == "recv_anysource")
            self._undo.append(patch_method(dist.ProcessGroup, name, observe))
        self._undo.append(patch_method(dist.Work, "wait", self._waited))

    def detach(self) -> None:
        """Remove all patches."""
        while self._undo:
            self._undo.pop()()
        self._works.clear()

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Add the messages."""
        return rows + message_rows(self.observed)

    def forget(self) -> None:
        """Drop everything observed."""
        self.observed.clear()

    def _start(
        self, kind: str, of_anybody: bool, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        enqueue_ns = time.monotonic_ns()
        work = original(group, *args, **kwargs)
        if threading.current_thread().name == THREAD_NAME or work is None:
            return work
        tensors, *rest = (*args, *kwargs.values())
        peer = -1 if of_anybody else self._groups.rank_of(group, int(rest[0]))
        seen = ObservedMessage(
            kind,
            self._groups.name_of(group),
            peer,
            sum(map(_size_bytes, tensors)),
            self._now.step,
            enqueue_ns,
            self._pipelines.label_of(tensors),
        )
        if peer >= 0:
            self._count(seen)
        if self._now.recording:
            self.observed.append(seen)
        self._works[work] = (seen, group)
        return work

    def _waited(self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        seen, group = self._works.pop(work, (None, None))
        if seen is not None and group is not None:
            seen.end_ns = time.monotonic_ns()
            if seen.peer < 0:
                seen.peer = self._groups.rank_of(group, torch_private.source_of(work))
                self._count(seen)
        return result

    def _count(self, seen: ObservedMessage) -> None:
        """Number a message among those from one rank to another in its group; both ends count alike."""
        ends = seen.kind, seen.group, seen.peer
        seen.sequence = self._sequences[ends]
        self._sequences[ends] += 1


def message_rows(observed: Iterable[ObservedMessage]) -> list[Event]:
    """Events of messages. A message that was never waited for has no duration; one of unknown peer is left out."""
    return [
        Event(
            seen.kind, seen.kind, Stream.COMMUNICATION, seen.step, seen.enqueue_ns,
            max(seen.end_ns - seen.enqueue_ns, 0), enqueue_ns=seen.enqueue_ns, group=seen.group,
            sequence=seen.sequence, size_bytes=seen.size_bytes, peer=seen.peer,
            stage=seen.label.stage, micro_batch=seen.label.micro_batch,
        )
        for seen in observed if seen.peer >= 0
    ]  # fmt: skip


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
