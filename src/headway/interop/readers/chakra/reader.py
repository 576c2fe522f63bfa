"""MLCommons Chakra: one rank's graph of computation and communication, with or without times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway import intervals
from headway.arrays import Indices, Texts
from headway.errors import TraceError
from headway.interop.readers.chakra import communication
from headway.interop.readers.chakra import timing as step_marks
from headway.interop.readers.chakra.communication import Communication, communication_of, host_calls
from headway.interop.readers.chakra.document import ChakraDocument, Nodes, NodeType, looks_like_chakra, parse
from headway.interop.readers.chakra.timing import LONGEST_NS, Steps, Timing, timing_of
from headway.interop.readers.execution_trace import ExecutedCommunication
from headway.interop.readers.foreign import Companion, Document, ForeignRank, Reading
from headway.interop.readers.ranks import rank_in_name
from headway.interop.readers.torch_json import ints, whole
from headway.intervals import Spans
from headway.trace.events import Events, Kind, Stream, texts
from headway.trace.format import MAX_WORLD_SIZE

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
        stated = step_marks.stated(windows) if timing.stated else None
        if stated is not None:
            return stated
        marked = step_marks.marked(self.nodes.name, timing.start_ns, end_ns)
        if marked is not None:
            return self._on_device(marked) if self.device else marked
        return step_marks.repeated(self.nodes.name[own].tolist(), timing.start_ns[own], first_ns, end_ns)

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
        own = self.computing[kinds != communication.REST]
        kinds = kinds[kinds != communication.REST]
        step = found.of(self.timing.start_ns[own])
        own, kinds, step = own[step >= 0], kinds[step >= 0], step[step >= 0]
        names = [
            communication.shown(name, kind)[:_LONGEST_NAME]
            for name, kind in zip(self.nodes.name[own].tolist(), kinds.tolist(), strict=True)
        ]
        return Events.from_columns(
            kind=kinds, stream=Stream.COMPUTE, name=texts(names), step=found.number[step],
            start_ns=self.timing.start_ns[own], duration_ns=self.nodes.duration_ns[own],
            bucket=self.nodes.whole["headway_bucket"][own],
        )  # fmt: skip

    def _kinds(self) -> Texts:
        """The kind of each computation. PyTorch's outside of backward and optimizer is taken for forward."""
        kinds = communication.of_nodes(self.nodes)
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


_NAMED = re.compile(r"\.et(?:\.gz)?$")
_RANK = re.compile(r"\.(\d{1,6})\.et(?:\.gz)?$")  # Chakra's tools and ASTRA-sim name files so
_WORLD = ("", "0")  # how the group of all ranks is called
_DEFAULT_GROUP = "default_pg"  # how PyTorch describes it


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is a Chakra trace: by its name, or by the form of its first messages."""
    named = bool(_NAMED.search(name)) and head.lstrip()[:1] not in (b"{", b"[")
    return named or looks_like_chakra(head)


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read one rank's graph; where it states no times, nodes run as soon as what they depend on has ended.

    Raises TraceError where the file is damaged, or its nodes wait for themselves.
    """
    found = parse(document)
    called = host_calls(found.nodes)
    communication = communication_of(found.nodes, called, _members(found, called), _names(found, called))
    timing = timing_of(document, found.nodes, communication)
    rank = RankNodes.of(found.nodes, communication, timing)
    steps = rank.steps(found.attributes.get("headway_steps"))
    if not len(steps.number):
        raise TraceError(
            f"{document.name} holds nothing that takes time",
            got=f"{len(found.nodes)} nodes without a duration",
            expected="computation or communication with durations",
        )
    notes = [
        *found.notes,
        *steps.notes,
        *timing.notes,
        *communication.notes,
        *_timeless(found.nodes, communication),
    ]
    return Reading(
        ranks=[
            ForeignRank(
                source=document.name,
                framework="chakra",
                events=rank.events(steps),
                rank=_rank(found, document.name),
                world_size=_world_size(found, called),
                host=_text(found, "host"),
                backend=_text(found, "backend"),
                version=_text(found, "schema"),
                clock=_text(found, "clock") if timing.stated else "",
                groups={
                    _names(found, called).get(name, name): ranks for name, ranks in called.groups.items()
                },
                dropped_events=found.dropped + timing.dropped,
                notes=notes,
            )
        ]
    )


def _timeless(nodes: Nodes, communication: Communication) -> list[str]:
    without = int((nodes.duration_ns[communication.index] == 0).sum())
    count = len(communication.index)
    if not count:
        return ["No communication is recorded."]
    return (
        [f"{without} of {count} communication nodes state no duration and take no time."] if without else []
    )


def _rank(found: ChakraDocument, name: str) -> int | None:
    stated = whole(found.attributes.get("rank"), MAX_WORLD_SIZE - 1)
    if stated >= 0:
        return stated
    named = _RANK.search(name)
    return int(named[1]) if named else rank_in_name(name)


def _world_size(found: ChakraDocument, called: ExecutedCommunication) -> int | None:
    """How many ranks there are: as stated, or as PyTorch says of its default group."""
    stated = whole(found.attributes.get("world_size"), MAX_WORLD_SIZE)
    if stated > 0:
        return stated
    default = [name for name, words in called.descriptions.items() if words == _DEFAULT_GROUP]
    return len(called.groups.get(default[0], ())) or None if default else None


def _members(found: ChakraDocument, called: ExecutedCommunication) -> dict[str, int]:
    """How many ranks each group has, where that is known."""
    world_size = _world_size(found, called)
    everybody = dict.fromkeys(_WORLD, world_size) if world_size else {}
    return {**everybody, **{name: len(ranks) for name, ranks in called.groups.items()}}


def _names(found: ChakraDocument, called: ExecutedCommunication) -> dict[str, str]:
    """What Headway called the groups to which it gave numbers, as ASTRA-sim wants them."""
    return dict(called.descriptions) if "headway" in found.attributes else {}


def _text(found: ChakraDocument, name: str) -> str:
    value = found.attributes.get(name)
    return value[:200] if isinstance(value, str) else ""
