"""Dataflow: the operations of some steps over all ranks and links, and what each waits for, in flat arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NO_RESOURCE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Dataflow:
    """Operations in flat arrays of one length, and their successors in compressed rows.

    An operation uses up to two resources (a sender's and a receiver's side of a link), for ``duration_ns`` where it
    has them to itself, and is done ``latency_ns`` after it has left them. Operations of one ``queue`` on one sender's
    side, as messages of one connection, go one after the other. ``successors[first[i]:first[i + 1]]`` wait for
    operation ``i``; ``waits_for`` counts predecessors.
    """

    duration_ns: Ints
    latency_ns: Ints
    sender: Ints
    receiver: Ints
    queue: Ints
    first: Ints
    successors: Ints
    waits_for: Ints
    resources: int

    def __len__(self) -> int:
        return len(self.duration_ns)


class DataflowBuilder:
    """Collects operations and edges, in any order, and closes them into a Dataflow."""

    def __init__(self, resources: int = 0) -> None:
        self.resources = resources
        self._duration_ns = array("q")
        self._latency_ns = array("q")
        self._sender = array("q")
        self._receiver = array("q")
        self._queue = array("q")
        self._before = array("q")
        self._after = array("q")

    def operation(
        self,
        duration_ns: int = 0,
        *,
        after: Iterable[int] = (),
        latency_ns: int = 0,
        sender: int = NO_RESOURCE,
        receiver: int = NO_RESOURCE,
        queue: int = 0,
    ) -> int:
        """Add an operation that waits for those in ``after``; returns its number."""
        number = len(self._duration_ns)
        self._duration_ns.append(duration_ns)
        self._latency_ns.append(latency_ns)
        self._sender.append(sender)
        self._receiver.append(receiver)
        self._queue.append(queue)
        for before in after:
            self.edge(before, number)
        return number

    def edge(self, before: int, after: int) -> None:
        """Have ``after`` wait for ``before``."""
        self._before.append(before)
        self._after.append(after)

    def close(self) -> Dataflow:
        """The finished graph."""
        count = len(self._duration_ns)
        before = np.array(self._before, dtype=np.int64)
        after = np.array(self._after, dtype=np.int64)
        order = np.argsort(before, kind="stable")
        first = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(before, minlength=count), out=first[1:])
        return Dataflow(
            duration_ns=np.array(self._duration_ns, dtype=np.int64),
            latency_ns=np.array(self._latency_ns, dtype=np.int64),
            sender=np.array(self._sender, dtype=np.int64),
            receiver=np.array(self._receiver, dtype=np.int64),
            queue=np.array(self._queue, dtype=np.int64),
            first=first,
            successors=after[order],
            waits_for=np.bincount(after, minlength=count).astype(np.int64),
            resources=self.resources,
        )
