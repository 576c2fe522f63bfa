"""When a Chakra trace's nodes ran: as it states, or else as their dependencies permit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from headway.arrays import Ints
from headway.interop.readers.chakra.communication import Communication
from headway.interop.readers.chakra.document import LONGEST_US, Nodes
from headway.interop.readers.chakra.layout import EndlessError, Layout, lay_out
from headway.interop.readers.chakra.schema import NodeType
from headway.interop.readers.foreign import Document, damaged

_COMPUTES = (NodeType.COMP, NodeType.SEND, NodeType.RECEIVE, NodeType.COLLECTIVE)


@dataclass(frozen=True, slots=True, eq=False)
class Timing:
    """When nodes start and end, in nanoseconds; -1 for the start of what waits for itself.

    ``asked_ns`` is when communication was asked for, or a device's computation: when what the host computed for it, or
    else what was computed for it, had ended.
    """

    start_ns: Ints
    end_ns: Ints
    asked_ns: Ints
    stated: bool  # whether the file says when nodes ran
    dropped: int
    notes: tuple[str, ...]


def timing_of(document: Document, nodes: Nodes, communication: Communication) -> Timing:
    """Time the nodes. Raises TraceError where some wait for themselves, or take longer than can be counted."""
    layout, needs, notes = _laid_out(document, nodes, communication)
    runs = layout.start_ns >= 0
    stated = bool(nodes.start_ns.any())
    start_ns = np.where(runs, nodes.start_ns, -1) if stated else layout.start_ns
    end_ns = start_ns + nodes.duration_ns
    if not stated:
        notes.append("Nothing states when nodes ran: each starts as soon as what it depends on has ended.")
    communicates = np.zeros(len(nodes), dtype=bool)
    communicates[communication.index] = True
    asked_ns = np.minimum(start_ns, start_ns if stated else layout.ready_ns)
    for index in np.flatnonzero(communicates | ~nodes.on_host).tolist():
        own = [need for need in needs[index] if not communicates[need]]
        own = [need for need in own if nodes.on_host[need]] or (own if communicates[index] else [])
        if own:
            asked_ns[index] = min(max(int(end_ns[need]) for need in own), int(start_ns[index]))
    if stated:  # then traces that Headway wrote state this, too
        told_us = nodes.whole["headway_asked"]
        told = (told_us >= 0) & (told_us < LONGEST_US)
        asked_ns = np.where(told, np.minimum(np.where(told, told_us, 0) * 1000, start_ns), asked_ns)
    return Timing(start_ns, end_ns, asked_ns, stated, layout.stuck, tuple(notes))


def _laid_out(
    document: Document, nodes: Nodes, communication: Communication
) -> tuple[Layout, list[tuple[int, ...]], list[str]]:
    """Let the nodes run; the dependencies that counted; and what has to be said of them."""
    queues = _queues(nodes, communication)
    durations = nodes.duration_ns.tolist()
    notes = []
    needs = [(*data, *control) for data, control in zip(nodes.data_deps, nodes.ctrl_deps, strict=True)]
    try:
        layout = lay_out(needs, durations, queues, nodes.id)
        if layout.stuck:
            needs = nodes.data_deps
            layout = lay_out(needs, durations, queues, nodes.id)
            notes.append("Some nodes call themselves in a cycle: only dependencies on data count.")
    except EndlessError:
        raise damaged(document, "nodes that take longer than 146 years") from None
    if layout.stuck:
        stuck = nodes.id[int(np.flatnonzero(layout.start_ns < 0)[0])]
        if not document.lenient:
            raise damaged(document, f"{layout.stuck} nodes that wait for themselves, {stuck} among them")
        notes.append(f"{layout.stuck} nodes wait for themselves and were left out.")
    return layout, needs, notes


def _queues(nodes: Nodes, communication: Communication) -> list[Hashable]:
    """What each node takes its turn in. A device's streams go by their number or, in older files, by a thread's."""
    streams = np.where(nodes.whole["stream"] >= 0, nodes.whole["stream"], nodes.whole["tid"])
    queues: list[Hashable] = [None] * len(nodes)
    computes = np.isin(nodes.type, _COMPUTES)
    for index in np.flatnonzero(computes).tolist():
        queues[index] = "host" if nodes.on_host[index] else ("stream", int(streams[index]))
    for index in np.flatnonzero(np.isin(nodes.type, (NodeType.MEM_LOAD, NodeType.MEM_STORE))).tolist():
        queues[index] = "memory"
    for index, queue in zip(communication.index.tolist(), communication.queues(), strict=True):
        queues[index] = queue
    return queues
