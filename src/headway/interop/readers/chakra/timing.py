"""Computes when a Chakra trace's nodes ran: as stated, or else as early as their dependencies permit.

Without stated times, a node runs once its dependencies have ended and its queue is free. The host and each stream of a
device run one node at a time, each process group one collective; a queue takes the ready node with the lowest id, as
ASTRA-sim does. Nodes without a queue run immediately.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.interop.readers.chakra.communication import Communication
from headway.interop.readers.chakra.document import LONGEST_US, Nodes
from headway.interop.readers.chakra.schema import NodeType
from headway.interop.readers.foreign import Document, damaged
from headway.interop.readers.torch_json import bounded_int, ints
from headway.trace.events import Events, Kind, Stream, texts

LONGEST_NS = 2**62


@dataclass(frozen=True, eq=False)
class Layout:
    """When each node started, and when all its dependencies had ended; -1 for nodes that never start."""

    start_ns: Ints
    ready_ns: Ints

    @property
    def stuck(self) -> int:
        """The number of nodes that never start, because their dependencies form a cycle."""
        return int((self.start_ns < 0).sum())


class EndlessError(ValueError):
    """The total time exceeds 64 bits of nanoseconds."""


def lay_out(
    depends_on: Sequence[Sequence[int]],
    duration_ns: Sequence[int],
    queue: Sequence[Hashable],
    number: Sequence[int],
) -> Layout:
    """Schedule the nodes. ``depends_on`` has indices, ``queue`` is None for no queue, ``number`` orders a queue.

    Raises EndlessError if times exceed 64 bits.
    """
    count = len(duration_ns)
    after: list[list[int]] = [[] for _ in range(count)]
    pending = np.zeros(count, dtype=np.int64).tolist()
    for node, needs in enumerate(depends_on):
        for need in set(needs):
            after[need].append(node)
            pending[node] += 1
    start, ready = [-1] * count, [-1] * count
    waiting: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    busy: set[Hashable] = set()
    ends: list[tuple[int, int]] = []  # a heap of when running nodes end
    now = 0

    def run(node: int) -> None:
        start[node] = now
        heapq.heappush(ends, (now + duration_ns[node], node))

    def offer(node: int) -> None:
        ready[node] = now
        if queue[node] is None:
            run(node)
        else:
            heapq.heappush(waiting[queue[node]], (number[node], node))

    for node in range(count):
        if not pending[node]:
            offer(node)
    touched = set(waiting)
    while True:
        for free in touched:
            if free not in busy and waiting[free]:
                busy.add(free)
                run(heapq.heappop(waiting[free])[1])
        if not ends:
            break
        now = ends[0][0]
        if now > LONGEST_NS:
            raise EndlessError
        touched = set()
        while ends and ends[0][0] == now:
            _, node = heapq.heappop(ends)
            busy.discard(queue[node])
            touched.add(queue[node])
            for child in after[node]:
                pending[child] -= 1
                if not pending[child]:
                    offer(child)
                    touched.add(queue[child])
        touched.discard(None)
    return Layout(np.array(start, dtype=np.int64), np.array(ready, dtype=np.int64))


_MARK = re.compile(r"^ProfilerStep\s?#\s?(\d{1,15})$")
LEAST_PERIOD = 2  # fewest computations of a step found by repetition


@dataclass(frozen=True, eq=False)
class Steps:
    """Step windows in order. ``notes`` say how they were found if nothing marks them.

    ``begun_ns`` is when the host began the steps, if they are windows of a device, which lags behind.
    """

    number: Ints
    start_ns: Ints
    end_ns: Ints
    notes: tuple[str, ...] = ()
    begun_ns: Ints | None = None

    def of(self, moments: Ints) -> npt.NDArray[np.intp]:
        """The index of the last step that began before each moment; -1 if there is none."""
        steps: npt.NDArray[np.intp] = np.searchsorted(self.start_ns, moments, side="right") - 1
        return steps

    def of_causes(self, ends: Ints) -> npt.NDArray[np.intp]:
        """The index of the step that caused a launch at each of ``ends``; the end of a step belongs to it."""
        begun_ns = self.start_ns if self.begun_ns is None else self.begun_ns
        before, until = (np.searchsorted(begun_ns, ends, side=side) - 1 for side in ("left", "right"))
        steps: npt.NDArray[np.intp] = np.maximum(before, np.minimum(until, 0))
        return steps

    def events(self) -> Events:
        """STEP events."""
        return Events.from_columns(
            kind=Kind.STEP, stream=Stream.COMPUTE, name=texts([f"step {number}" for number in self.number.tolist()]),
            step=self.number, start_ns=self.start_ns, duration_ns=self.end_ns - self.start_ns,
        )  # fmt: skip


def stated(windows: object) -> Steps | None:
    """Steps from a flat list of (number, start, end) in microseconds, as Headway writes them; None if invalid."""
    if not isinstance(windows, list) or not windows or len(windows) % 3:
        return None
    rows = [
        tuple(bounded_int(value, 2**62 // 1000) for value in windows[at : at + 3])
        for at in range(0, len(windows), 3)
    ]
    ordered = all(before[2] <= after[1] and before[0] < after[0] for before, after in pairwise(rows))
    if not ordered or any(min(row) < 0 or row[1] >= row[2] for row in rows):
        return None
    number, start_us, end_us = (ints(column) for column in zip(*rows, strict=True))
    return Steps(number, start_us * 1000, end_us * 1000)


def marked(name: Texts, start_ns: Ints, end_ns: int) -> Steps | None:
    """The steps marked by ``profiler.step()``: each lasts until the next, the last until ``end_ns``. None if unmarked."""
    marks = {
        int(match[1]): int(start_ns[index])
        for index, text in reversed(list(enumerate(name.tolist())))
        if text.startswith("ProfilerStep") and (match := _MARK.match(text))
    }
    rows = sorted((start, number) for number, start in marks.items())
    starts = [start for start, _ in rows]
    if not starts or len(set(starts)) < len(starts) or starts[-1] >= end_ns:
        return None
    return Steps(ints([number for _, number in rows]), ints(starts), ints([*starts[1:], end_ns]))


def repeated(name: Sequence[str], start_ns: Ints, first_ns: int, end_ns: int) -> Steps:
    """Steps from repetitions of the computations ``name``, ordered by start; a single step if nothing repeats."""
    code_of_name: dict[str, int] = {}
    codes = ints([code_of_name.setdefault(text, len(code_of_name)) for text in name])
    count = len(codes)
    period = next(
        (p for p in _divisors(count) if p >= LEAST_PERIOD and np.array_equal(codes[p:], codes[: count - p])),
        count,
    )
    starts = start_ns[::period].copy() if count else ints([first_ns])
    starts[0] = first_ns
    if period == count or (np.diff(starts) <= 0).any() or starts[-1] >= end_ns:
        note = "Steps are not marked, and nothing repeats: everything counts as one step."
        return Steps(ints([0]), ints([first_ns]), ints([end_ns]), (note,))
    note = f"Steps are not marked: computation repeats {len(starts)} times, and each repetition counts as one step."
    return Steps(np.arange(len(starts), dtype=np.int64), starts, np.append(starts[1:], end_ns), (note,))


def _divisors(count: int) -> list[int]:
    small = [divisor for divisor in range(1, int(count**0.5) + 1) if count % divisor == 0]
    return sorted({*small, *(count // divisor for divisor in small)})


_COMPUTES = (NodeType.COMP, NodeType.SEND, NodeType.RECEIVE, NodeType.COLLECTIVE)


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """When nodes start and end, in nanoseconds; start -1 for nodes in a cycle.

    ``asked_ns`` is when communication or device computation was launched: when the host nodes, or else all
    computation, that it depends on had ended.
    """

    start_ns: Ints
    end_ns: Ints
    asked_ns: Ints
    stated: bool  # whether the file says when nodes ran
    dropped: int
    notes: tuple[str, ...]


def timing_of(document: Document, nodes: Nodes, communication: Communication) -> Timing:
    """Time the nodes. Raises TraceError if dependencies form a cycle or times exceed 64 bits."""
    layout, needs, notes = _laid_out(document, nodes, communication)
    runs = layout.start_ns >= 0
    stated = bool(nodes.start_ns.any())
    start_ns = np.where(runs, nodes.start_ns, -1) if stated else layout.start_ns
    end_ns = start_ns + nodes.duration_ns
    if not stated:
        notes.append("Start times are not recorded: each node starts as soon as its dependencies have ended.")
    communicates = np.zeros(len(nodes), dtype=bool)
    communicates[communication.index] = True
    asked_ns = np.minimum(start_ns, start_ns if stated else layout.ready_ns)
    for index in np.flatnonzero(communicates | ~nodes.on_host).tolist():
        causes = [need for need in needs[index] if not communicates[need]]
        causes = [need for need in causes if nodes.on_host[need]] or (causes if communicates[index] else [])
        if causes:
            asked_ns[index] = min(max(int(end_ns[need]) for need in causes), int(start_ns[index]))
    if stated:  # traces written by Headway state launch times, too
        stated_us = nodes.integers["headway_asked"]
        is_stated = (stated_us >= 0) & (stated_us < LONGEST_US)
        asked_ns = np.where(
            is_stated, np.minimum(np.where(is_stated, stated_us, 0) * 1000, start_ns), asked_ns
        )
    return Timing(start_ns, end_ns, asked_ns, stated, layout.stuck, tuple(notes))


def _laid_out(
    document: Document, nodes: Nodes, communication: Communication
) -> tuple[Layout, list[tuple[int, ...]], list[str]]:
    """Schedule the nodes; returns the layout, the dependencies that it used, and notes."""
    queues = _queues(nodes, communication)
    durations = nodes.duration_ns.tolist()
    notes = []
    needs = [(*data, *control) for data, control in zip(nodes.data_deps, nodes.ctrl_deps, strict=True)]
    try:
        layout = lay_out(needs, durations, queues, nodes.id)
        if layout.stuck:
            needs = nodes.data_deps
            layout = lay_out(needs, durations, queues, nodes.id)
            notes.append("Control dependencies form a cycle: only data dependencies were used.")
    except EndlessError:
        raise damaged(document, "a total time of more than 146 years") from None
    if layout.stuck:
        stuck = nodes.id[int(np.flatnonzero(layout.start_ns < 0)[0])]
        if not document.lenient:
            raise damaged(document, f"{layout.stuck} nodes in a dependency cycle, such as {stuck}")
        notes.append(f"{layout.stuck} nodes in a dependency cycle were left out.")
    return layout, needs, notes


def _queues(nodes: Nodes, communication: Communication) -> list[Hashable]:
    """The queue of each node. Device streams are identified by number or, in older files, by thread."""
    streams = np.where(nodes.integers["stream"] >= 0, nodes.integers["stream"], nodes.integers["tid"])
    queues: list[Hashable] = [None] * len(nodes)
    computes = np.isin(nodes.type, _COMPUTES)
    for index in np.flatnonzero(computes).tolist():
        queues[index] = "host" if nodes.on_host[index] else ("stream", int(streams[index]))
    for index in np.flatnonzero(np.isin(nodes.type, (NodeType.MEM_LOAD, NodeType.MEM_STORE))).tolist():
        queues[index] = "memory"
    for index, queue in zip(communication.index.tolist(), communication.queues(), strict=True):
        queues[index] = queue
    return queues
