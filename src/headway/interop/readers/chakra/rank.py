"""One Chakra file's nodes, timed, as one rank's events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway import intervals
from headway.arrays import Indices, Texts
from headway.interop.readers.chakra import phases, steps
from headway.interop.readers.chakra.communication import Communication
from headway.interop.readers.chakra.document import Nodes
from headway.interop.readers.chakra.layout import LONGEST_NS
from headway.interop.readers.chakra.schema import NodeType
from headway.interop.readers.chakra.steps import Steps
from headway.interop.readers.chakra.timing import Timing
from headway.interop.readers.torch_json import ints
from headway.intervals import Spans
from headway.trace.events import Events, Kind, Stream, texts

_COMPUTES = (
    NodeType.COMP,
    NodeType.MEM_LOAD,
    NodeType.MEM_STORE,
    NodeType.SEND,
    NodeType.RECEIVE,
    NodeType.COLLECTIVE,
)
_CALLS = ("c10d::", "record_param_comms", "nccl:")
_LONGEST_NAME = 200


@dataclass(frozen=True, eq=False)
class RankNodes:
    """A rank's nodes with their times. ``computing`` are those that make up its computation, in order of their start.

    Where a device computes, what its host does is not computation but asks for it.
    """

    nodes: Nodes
    communication: Communication
    timing: Timing
    computing: Indices
    device: bool

    @classmethod
    def of(cls, nodes: Nodes, communication: Communication, timing: Timing) -> RankNodes:
        """Tell computation from the rest."""
        runs = np.isin(nodes.type, _COMPUTES) & (nodes.duration_ns > 0) & (timing.start_ns >= 0)
        runs[communication.index] = False
        device = bool((runs & ~nodes.on_host).any() and nodes.on_host.any())
        chosen = np.flatnonzero(runs & ~nodes.on_host if device else runs)
        return cls(
            nodes, communication, timing, chosen[np.argsort(timing.start_ns[chosen], kind="stable")], device
        )

    def steps(self, windows: object) -> Steps:
        """The steps: as ``windows`` states them, as marks do, or as computation repeats; none without any time."""
        timing, own = self.timing, self.computing
        taking = np.concatenate([own, self.communication.index])
        taking = taking[timing.start_ns[taking] >= 0]
        first_ns = int(timing.start_ns[taking].min(initial=LONGEST_NS))
        end_ns = int(timing.end_ns[taking].max(initial=0))
        if end_ns <= first_ns:
            return Steps(ints([]), ints([]), ints([]))
        stated = steps.stated(windows) if timing.stated else None
        if stated is not None:
            return stated
        marked = steps.marked(self.nodes.name, timing.start_ns, end_ns)
        if marked is not None:
            return self._on_device(marked) if self.device else marked
        return steps.repeated(self.nodes.name[own].tolist(), timing.start_ns[own], first_ns, end_ns)

    def _on_device(self, marked: Steps) -> Steps:
        """The steps as the device sees them: each from its first computation on."""
        own = self.computing
        step = marked.of_causes(self.timing.asked_ns[own])
        own, step = own[step >= 0], step[step >= 0]
        present, firsts = np.unique(step, return_index=True)
        starts = self.timing.start_ns[own[firsts]]
        if not len(present) or (np.diff(starts) <= 0).any():
            return marked
        ends = np.append(starts[1:], self.timing.end_ns[own].max())
        return Steps(marked.number[present], starts, ends, begun_ns=marked.start_ns[present])

    def events(self, found: Steps) -> Events:
        """Steps, computation, communication, and where the first waits for the second."""
        return Events.concatenated(
            [found.events(), self._computation(found), self._communication(found), self._waits(found)]
        )

    def _computation(self, found: Steps) -> Events:
        kinds = self._kinds()
        own = self.computing[kinds != phases.REST]
        kinds = kinds[kinds != phases.REST]
        step = found.of(self.timing.start_ns[own])
        own, kinds, step = own[step >= 0], kinds[step >= 0], step[step >= 0]
        names = [
            phases.shown(name, kind)[:_LONGEST_NAME]
            for name, kind in zip(self.nodes.name[own].tolist(), kinds.tolist(), strict=True)
        ]
        return Events.from_columns(
            kind=kinds, stream=Stream.COMPUTE, name=texts(names), step=found.number[step],
            start_ns=self.timing.start_ns[own], duration_ns=self.nodes.duration_ns[own],
            bucket=self.nodes.whole["headway_bucket"][own],
        )  # fmt: skip

    def _kinds(self) -> Texts:
        """The kind of each computation. PyTorch's outside of backward and optimizer is taken for forward."""
        kinds = phases.of_nodes(self.nodes)
        otherwise = Kind.FORWARD if (self.nodes.whole["rf_id"] >= 0).any() else Kind.OPERATOR
        return texts(
            [
                Kind.OPERATOR if name.startswith(_CALLS) else kinds[index] or otherwise
                for index, name in zip(
                    self.computing.tolist(), self.nodes.name[self.computing].tolist(), strict=True
                )
            ]
        )

    def _communication(self, found: Steps) -> Events:
        own = self.communication
        runs = self.timing.start_ns[own.index] >= 0
        step = found.of_causes(self.timing.asked_ns[own.index])
        kept = np.flatnonzero(runs & (step >= 0))
        index = own.index[kept]
        return Events.from_columns(
            kind=own.kind[kept], stream=Stream.COMMUNICATION, name=own.name[kept], step=found.number[step[kept]],
            start_ns=self.timing.start_ns[index], duration_ns=self.nodes.duration_ns[index],
            enqueue_ns=self.timing.asked_ns[index], group=own.group[kept], sequence=own.sequence[kept],
            size_bytes=own.size_bytes[kept], bucket=own.bucket[kept], peer=own.peer[kept],
            algorithm=own.algorithm[kept],
        )  # fmt: skip

    def _waits(self, found: Steps) -> Events:
        """Where nothing is computed while some communication is in flight."""
        index = self.communication.index[self.timing.start_ns[self.communication.index] >= 0]
        asked, ends = self.timing.asked_ns[index], self.timing.end_ns[index]
        busy = intervals.union(self.timing.start_ns[self.computing], self.timing.end_ns[self.computing])
        windows = intervals.union(found.start_ns, found.end_ns)
        idle = intervals.intersect(intervals.subtract(intervals.union(asked, ends), busy), windows)
        return Events.from_columns(
            kind=Kind.WAIT, stream=Stream.COMPUTE, name=self._awaited(idle, index),
            step=found.number[found.of(idle[:, 0])], start_ns=idle[:, 0], duration_ns=idle[:, 1] - idle[:, 0],
        )  # fmt: skip

    def _awaited(self, idle: Spans, index: Indices) -> Texts:
        """The name of the last communication to end by the end of each wait."""
        if not len(index):
            return texts([])
        order = np.argsort(self.timing.end_ns[index], kind="stable")
        last = np.searchsorted(self.timing.end_ns[index][order], idle[:, 1], side="right") - 1
        rows = np.searchsorted(self.communication.index, index[order[np.maximum(last, 0)]])
        names: Texts = self.communication.name[rows]
        return names
