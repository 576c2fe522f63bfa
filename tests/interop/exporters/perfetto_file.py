"""Reads a Perfetto file as trace_processor does, and refuses what that would drop or count as an error.

All packets are sorted by time, those of equal times staying in the order of the file; slices of a track are a stack;
an arrow leads from the slice that began earlier to the other, and from the one that was read first where both began
at once.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2  # type: ignore[import-untyped]

PB: Any = perfetto_trace_pb2
MAX_DEPTH = 512


@dataclass(eq=False)
class Slice:
    process: str
    track: str
    category: str
    name: str
    start_ns: int
    annotations: dict[str, object]
    correlation: int | None
    parent: Slice | None
    end_ns: int | None = None
    instant: bool = False
    lane: int = 0  # the track's uuid


@dataclass
class PerfettoFile:
    packets: int = 0
    processes: dict[str, int] = field(default_factory=dict)  # name -> pid
    tracks: dict[int, str] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    flows: list[tuple[Slice, Slice]] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    names_said: int = 0
    order: list[str] = field(default_factory=list)

    def of_process(self, start: str) -> list[Slice]:
        return [one for one in self.slices if one.process.startswith(start)]


def read(path: Path) -> PerfettoFile:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    trace = PB.Trace()
    trace.ParseFromString(content)
    return _Reader(trace.packet).file


class _Reader:
    def __init__(self, packets: Any) -> None:
        self.file = PerfettoFile(packets=len(packets))
        self.descriptors: dict[int, Any] = {}
        self.open: dict[int, list[Slice]] = defaultdict(list)
        self.flowing: dict[int, Slice] = {}
        said: dict[int, dict[str, dict[int, str]]] = {}
        events = []
        for place, packet in enumerate(packets):
            sequence = packet.trusted_packet_sequence_id
            assert sequence > 0
            if packet.sequence_flags & PB.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED:
                assert sequence not in said, "said twice"
                said[sequence] = defaultdict(dict)
                assert packet.trace_packet_defaults.timestamp_clock_id == PB.BUILTIN_CLOCK_BOOTTIME
            if packet.HasField("interned_data"):
                self._intern(packet.interned_data, said[sequence])
            if packet.HasField("track_descriptor"):
                self._describe(packet.track_descriptor)
            if packet.HasField("track_event"):
                assert packet.sequence_flags == PB.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
                assert packet.HasField("timestamp")
                assert packet.timestamp < 2**63
                events.append((packet.timestamp, place, packet.track_event, said[sequence]))
        for time_ns, _, event, names in sorted(events, key=lambda one: one[:2]):
            self._event(time_ns, event, names)
        assert not any(self.open.values()), "never ended"
        if self.descriptors:
            self._order()

    def _intern(self, data: Any, said: dict[str, dict[int, str]]) -> None:
        for name in ("event_categories", "event_names", "debug_annotation_names"):
            for entry in getattr(data, name):
                assert entry.iid > 0
                assert said[name].setdefault(entry.iid, entry.name) == entry.name
                self.file.names_said += 1
        for entry in data.debug_annotation_string_values:
            said["strings"][entry.iid] = entry.str.decode()

    def _describe(self, descriptor: Any) -> None:
        assert descriptor.uuid not in self.descriptors
        self.descriptors[descriptor.uuid] = descriptor
        if descriptor.HasField("process"):
            assert descriptor.process.pid not in self.file.processes.values(), "taken for one process"
            assert descriptor.process.pid > 0
            self.file.processes[descriptor.process.process_name] = descriptor.process.pid
        elif descriptor.uuid:
            assert descriptor.sibling_merge_behavior == PB.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE
            self.file.tracks[descriptor.uuid] = descriptor.name

    def _order(self) -> None:
        assert self.descriptors[0].process_ordering == PB.TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        processes = [one for one in self.descriptors.values() if one.HasField("process")]
        processes.sort(key=lambda one: one.sibling_order_rank)
        self.file.order = [one.process.process_name for one in processes]

    def _event(self, time_ns: int, event: Any, names: dict[str, dict[int, str]]) -> None:
        descriptor = self.descriptors[event.track_uuid]
        if event.type == PB.TrackEvent.TYPE_COUNTER:
            assert descriptor.counter.unit_name == "Gbit/s"
            assert self.descriptors[descriptor.parent_uuid].name == "links"
            self.file.counters.setdefault(descriptor.name, []).append((time_ns, event.double_counter_value))
            return
        open_spans = self.open[event.track_uuid]
        if event.type == PB.TrackEvent.TYPE_SLICE_END:
            open_spans.pop().end_ns = time_ns
            return
        found = Slice(
            process=self.descriptors[descriptor.parent_uuid].process.process_name,
            track=descriptor.name,
            category="".join(names["event_categories"][number] for number in event.category_iids),
            name=names["event_names"][event.name_iid] if event.name_iid else "",
            start_ns=time_ns,
            annotations=_annotations(event, names),
            correlation=event.correlation_id if event.HasField("correlation_id") else None,
            parent=open_spans[-1] if open_spans else None,
            lane=event.track_uuid,
        )
        self.file.slices.append(found)
        if event.type == PB.TrackEvent.TYPE_SLICE_BEGIN:
            open_spans.append(found)
            assert len(open_spans) < MAX_DEPTH
        else:
            assert event.type == PB.TrackEvent.TYPE_INSTANT
            found.instant, found.end_ns = True, time_ns
        self._flows(event, found)

    def _flows(self, event: Any, found: Slice) -> None:
        for number in event.flow_ids:
            assert number not in self.flowing, "begun twice"
            self.flowing[number] = found
        for number in event.terminating_flow_ids:
            source = self.flowing.pop(number)  # trace_processor drops the ends of flows that have not begun
            assert source.start_ns <= found.start_ns, "drawn backwards"
            self.file.flows.append((source, found))


def _annotations(event: Any, names: dict[str, dict[int, str]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for said in event.debug_annotations:
        name = names["debug_annotation_names"][said.name_iid]
        assert name not in found
        if said.HasField("string_value_iid"):
            found[name] = names["strings"][said.string_value_iid]
        else:
            found[name] = said.int_value
    return found
