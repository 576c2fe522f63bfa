"""Reads an MLCommons Chakra trace: one rank's graph of computation and communication, with or without times."""

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
from headway.interop.readers.chakra.document import ChakraDocument, Nodes, looks_like_chakra, parse
from headway.interop.readers.chakra.schema import NodeType
from headway.interop.readers.chakra.timing import LONGEST_NS, Steps, Timing, timing_of
from headway.interop.readers.execution_trace import ExecutedCommunication
from headway.interop.readers.foreign import Companion, Document, ForeignRank, Reading
from headway.interop.readers.ranks import rank_in_name
from headway.interop.readers.torch_json import bounded_int, ints
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
    """A rank's nodes with their times. ``computing`` are its computation nodes, ordered by start.

    If a device computes, host nodes only launch work and do not count as computation.
    """

    nodes: Nodes
    communication: Communication
    timing: Timing
    computing: Indices
    device: bool

    @classmethod
    def of(cls, nodes: Nodes, communication: Communication, timing: Timing) -> RankNodes:
        """Select the computation nodes."""
        runs = np.isin(nodes.type, _COMPUTES) & (nodes.duration_ns > 0) & (timing.start_ns >= 0)
        runs[communication.index] = False
        device = bool((runs & ~nodes.on_host).any() and nodes.on_host.any())
        chosen = np.flatnonzero(runs & ~nodes.on_host if device else runs)
        return cls(
            nodes, communication, timing, chosen[np.argsort(timing.start_ns[chosen], kind="stable")], device
        )

    def steps(self, windows: object) -> Steps:
        """The steps from ``windows``, from marks, or from repeating computation; empty if nothing takes time."""
        timing, computing = self.timing, self.computing
        taking = np.concatenate([computing, self.communication.index])
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
        return step_marks.repeated(
            self.nodes.name[computing].tolist(), timing.start_ns[computing], first_ns, end_ns
        )

    def _on_device(self, marked: Steps) -> Steps:
        """The steps on the device: each begins with its first computation."""
        computing = self.computing
        step = marked.of_causes(self.timing.asked_ns[computing])
        computing, step = computing[step >= 0], step[step >= 0]
        present, firsts = np.unique(step, return_index=True)
        starts = self.timing.start_ns[computing[firsts]]
        if not len(present) or (np.diff(starts) <= 0).any():
            return marked
        ends = np.append(starts[1:], self.timing.end_ns[computing].max())
        return Steps(marked.number[present], starts, ends, begun_ns=marked.start_ns[present])

    def events(self, steps: Steps) -> Events:
        """Events for steps, computation, communication and waits."""
        return Events.concatenated(
            [steps.events(), self._computation(steps), self._communication(steps), self._waits(steps)]
        )

    def _computation(self, steps: Steps) -> Events:
        kinds = self._kinds()
        computing = self.computing[kinds != communication.REST]
        kinds = kinds[kinds != communication.REST]
        step = steps.of(self.timing.start_ns[computing])
        computing, kinds, step = computing[step >= 0], kinds[step >= 0], step[step >= 0]
        names = [
            communication.shown(name, kind)[:_LONGEST_NAME]
            for name, kind in zip(self.nodes.name[computing].tolist(), kinds.tolist(), strict=True)
        ]
        return Events.from_columns(
            kind=kinds, stream=Stream.COMPUTE, name=texts(names), step=steps.number[step],
            start_ns=self.timing.start_ns[computing], duration_ns=self.nodes.duration_ns[computing],
            bucket=self.nodes.integers["headway_bucket"][computing],
        )  # fmt: skip

    def _kinds(self) -> Texts:
        """The kind of each computation. In PyTorch traces, the default is forward."""
        kinds = communication.of_nodes(self.nodes)
        otherwise = Kind.FORWARD if (self.nodes.integers["rf_id"] >= 0).any() else Kind.OPERATOR
        return texts(
            [
                Kind.OPERATOR if name.startswith(_CALLS) else kinds[index] or otherwise
                for index, name in zip(
                    self.computing.tolist(), self.nodes.name[self.computing].tolist(), strict=True
                )
            ]
        )

    def _communication(self, steps: Steps) -> Events:
        columns = self.communication
        runs = self.timing.start_ns[columns.index] >= 0
        step = steps.of_causes(self.timing.asked_ns[columns.index])
        kept = np.flatnonzero(runs & (step >= 0))
        index = columns.index[kept]
        return Events.from_columns(
            kind=columns.kind[kept], stream=Stream.COMMUNICATION, name=columns.name[kept], step=steps.number[step[kept]],
            start_ns=self.timing.start_ns[index], duration_ns=self.nodes.duration_ns[index],
            enqueue_ns=self.timing.asked_ns[index], group=columns.group[kept], sequence=columns.sequence[kept],
            size_bytes=columns.size_bytes[kept], bucket=columns.bucket[kept], peer=columns.peer[kept],
            algorithm=columns.algorithm[kept],
        )  # fmt: skip

    def _waits(self, steps: Steps) -> Events:
        """Waits: communication in flight while nothing is computed."""
        index = self.communication.index[self.timing.start_ns[self.communication.index] >= 0]
        launched_ns, ends_ns = self.timing.asked_ns[index], self.timing.end_ns[index]
        busy = intervals.union(self.timing.start_ns[self.computing], self.timing.end_ns[self.computing])
        windows = intervals.union(steps.start_ns, steps.end_ns)
        idle = intervals.intersect(intervals.subtract(intervals.union(launched_ns, ends_ns), busy), windows)
        return Events.from_columns(
            kind=Kind.WAIT, stream=Stream.COMPUTE, name=self._awaited(idle, index),
            step=steps.number[steps.of(idle[:, 0])], start_ns=idle[:, 0], duration_ns=idle[:, 1] - idle[:, 0],
        )  # fmt: skip

    def _awaited(self, idle: Spans, index: Indices) -> Texts:
        """The name of the last communication that ended before the end of each wait."""
        if not len(index):
            return texts([])
        order = np.argsort(self.timing.end_ns[index], kind="stable")
        last = np.searchsorted(self.timing.end_ns[index][order], idle[:, 1], side="right") - 1
        rows = np.searchsorted(self.communication.index, index[order[np.maximum(last, 0)]])
        names: Texts = self.communication.name[rows]
        return names


_NAMED = re.compile(r"\.et(?:\.gz)?$")
_RANK = re.compile(r"\.(\d{1,6})\.et(?:\.gz)?$")  # as Chakra's tools and ASTRA-sim name files
_WORLD = ("", "0")  # names of the group of all ranks
_DEFAULT_GROUP = "default_pg"  # PyTorch's description of it


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is a Chakra trace, judged by its name or its first messages."""
    named = bool(_NAMED.search(name)) and head.lstrip()[:1] not in (b"{", b"[")
    return named or looks_like_chakra(head)


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read one rank's graph; without times, nodes run as soon as their dependencies have ended.

    Raises TraceError if the file is damaged or its dependencies form a cycle.
    """
    chakra = parse(document)
    called = host_calls(chakra.nodes)
    communication = communication_of(chakra.nodes, called, _members(chakra, called), _names(chakra, called))
    timing = timing_of(document, chakra.nodes, communication)
    rank = RankNodes.of(chakra.nodes, communication, timing)
    steps = rank.steps(chakra.attributes.get("headway_steps"))
    if not len(steps.number):
        raise TraceError(
            f"{document.name} contains no durations",
            got=f"{len(chakra.nodes)} nodes without a duration",
            expected="computation or communication with durations",
        )
    notes = [
        *chakra.notes,
        *steps.notes,
        *timing.notes,
        *communication.notes,
        *_timeless(chakra.nodes, communication),
    ]
    return Reading(
        ranks=[
            ForeignRank(
                source=document.name,
                framework="chakra",
                events=rank.events(steps),
                rank=_rank(chakra, document.name),
                world_size=_world_size(chakra, called),
                host=_text(chakra, "host"),
                backend=_text(chakra, "backend"),
                version=_text(chakra, "schema"),
                clock=_text(chakra, "clock") if timing.stated else "",
                groups={
                    _names(chakra, called).get(name, name): ranks for name, ranks in called.groups.items()
                },
                dropped_events=chakra.dropped + timing.dropped,
                notes=notes,
            )
        ]
    )


def _timeless(nodes: Nodes, communication: Communication) -> list[str]:
    without = int((nodes.duration_ns[communication.index] == 0).sum())
    count = len(communication.index)
    if not count:
        return ["No communication is recorded."]
    return [f"{without} of {count} communication nodes have no duration and take no time."] if without else []


def _rank(chakra: ChakraDocument, name: str) -> int | None:
    stated = bounded_int(chakra.attributes.get("rank"), MAX_WORLD_SIZE - 1)
    if stated >= 0:
        return stated
    named = _RANK.search(name)
    return int(named[1]) if named else rank_in_name(name)


def _world_size(chakra: ChakraDocument, called: ExecutedCommunication) -> int | None:
    """The number of ranks, as stated or from PyTorch's default group; None if unknown."""
    stated = bounded_int(chakra.attributes.get("world_size"), MAX_WORLD_SIZE)
    if stated > 0:
        return stated
    default = [name for name, words in called.descriptions.items() if words == _DEFAULT_GROUP]
    return len(called.groups.get(default[0], ())) or None if default else None


def _members(chakra: ChakraDocument, called: ExecutedCommunication) -> dict[str, int]:
    """The number of ranks of each group, if known."""
    world_size = _world_size(chakra, called)
    everybody = dict.fromkeys(_WORLD, world_size) if world_size else {}
    return {**everybody, **{name: len(ranks) for name, ranks in called.groups.items()}}


def _names(chakra: ChakraDocument, called: ExecutedCommunication) -> dict[str, str]:
    """The original names of groups: Headway numbers groups in its exports, as ASTRA-sim requires."""
    return dict(called.descriptions) if "headway" in chakra.attributes else {}


def _text(chakra: ChakraDocument, name: str) -> str:
    value = chakra.attributes.get(name)
    return value[:200] if isinstance(value, str) else ""
