"""Exports a trace as a native Perfetto file of TrackEvents, for ui.perfetto.dev and trace_processor.

Each rank is a process with tracks for computation, communication, steps and gradients; each link has a goodput counter.
A rank's packets form one sequence, whose names are written once. Arrows (flows) lead from sends to receives, and from
the last rank that arrives at a collective to its other members. Viewers draw arrows from the earlier event; if the
effect began before its cause, like a receive that waits for its send, the arrow leads to a mark on the effect at the
time of the cause. Marks come last in the file, so that at equal times the cause is read first.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from headway import files
from headway.arrays import Ints
from headway.diagnosis.communication import Communications
from headway.diagnosis.links import BITS_A_NS_IN_GBPS, ring_targets, sent_volumes
from headway.interop.exporters.perfetto_ranks import Chunk, Column, Packets, RankPieces, find_arrows, protos
from headway.interop.exporters.rank_tracks import clean, rank_tracks
from headway.trace.events import Events, Kind
from headway.trace.format import RankInfo, Trace

COMPRESSION = 3  # gzip level; higher ones are slow and save little


@contextmanager
def packed_file_written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that gets its name only if the block succeeds; gzip-compressed if that ends in .gz."""
    with files.file_written_whole(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as compressed:
                yield cast(IO[bytes], compressed)
        else:
            yield file


Rates = tuple[Ints, npt.NDArray[np.float64]]


def link_rates(trace: Trace, rows: Communications) -> dict[tuple[str, str], Rates]:
    """The goodput between hosts as a step function: times in ns, and the Gbit/s from each of them on.

    A rank is taken to send to its ring neighbour at a constant rate while a collective with all members is in flight.
    Traffic within hosts is left out if there is any between hosts.
    """
    rows = rows.where(~rows.inner)
    hosts = trace.hosts
    targets = ring_targets(rows)
    lengths = rows.end_ns - rows.arrival_ns
    gbps = BITS_A_NS_IN_GBPS * sent_volumes(rows) / np.maximum(lengths, 1)
    sending = np.flatnonzero((gbps > 0) & (targets >= 0) & (lengths > 0))
    crossing: dict[tuple[str, str], list[int]] = {}
    for row, rank, target in zip(
        sending.tolist(), rows.rank[sending].tolist(), targets[sending].tolist(), strict=True
    ):
        if rank in hosts and target in hosts:
            crossing.setdefault((hosts[rank], hosts[target]), []).append(row)
    apart = any(source != target for source, target in crossing)
    return {
        (source, target): _steps(rows.arrival_ns[rows_of_link], rows.end_ns[rows_of_link], gbps[rows_of_link])
        for (source, target), rows_of_link in sorted(crossing.items())
        if not apart or source != target
    }


def _steps(starts: Ints, ends: Ints, rates: npt.NDArray[np.float64]) -> Rates:
    """The sum of rates that each hold from start to end, as a step function."""
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times = times[order]
    sums = np.cumsum(np.concatenate([rates, -rates])[order])
    in_flight = np.cumsum(np.repeat([1, -1], len(starts))[order])
    sums = np.where(in_flight > 0, np.maximum(sums, 0.0), 0.0)  # remove rounding errors around zero
    last = np.append(times[1:] != times[:-1], True)
    return times[last], sums[last]


MARK = "cause"  # the category of marks
_LINKS, _MARKS, _FIRST_PROCESS = 2, 3, 4  # sequences; 1 is that of Perfetto's own service
_MOST_PIDS = 2**31 - 1


def require_perfetto() -> None:
    """Raise UserError if the perfetto package is not installed."""
    protos()


def write_perfetto(trace: Trace, path: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Write ``trace`` to ``path``, compressed if its name ends in .gz; returns the number of packets.

    ``progress`` is called with the number of finished and of all processes. Raises UserError if the file cannot be
    written or the package perfetto is not installed.
    """
    require_perfetto()
    written = 0
    with packed_file_written_whole(path) as file:
        for count, content in _Writer(trace).chunks(progress):
            file.write(content)
            written += count
    return written


def origin_ns(trace: Trace) -> int:
    """The time to subtract from all times: 0, unless some are negative, which Perfetto cannot represent."""
    everyone = (*trace.events.values(), *trace.servers.values())
    return min((int(events.start_ns.min(initial=0)) for events in everyone), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Process:
    """A rank, or a server (with ``rank`` -1), as a process in the viewer."""

    name: str
    rank: int
    pid: int
    info: RankInfo | None
    events: Events


def _processes(trace: Trace) -> list[_Process]:
    """Ranks, then servers, with unique pids, because viewers merge processes with the same pid."""
    manifest = trace.manifest
    ranks = {info.rank: info for info in manifest.ranks}
    servers = {info.rank: info for info in manifest.servers}
    listed = [
        *((f"rank {rank}", rank, ranks.get(rank), events) for rank, events in sorted(trace.events.items())),
        *(
            (f"server {server}", -1, servers.get(server), events)
            for server, events in sorted(trace.servers.items())
        ),
    ]
    times = Counter(info.pid for _, _, info, _ in listed if info is not None)
    usable = {pid for pid, count in times.items() if count == 1 and 0 < pid < _MOST_PIDS - len(listed)}
    following = max(usable, default=0)
    processes = []
    for name, rank, info, events in listed:
        if info is not None and info.pid in usable:
            pid = info.pid
        else:
            following += 1
            pid = following
        host = f" ({clean(info.host)})" if info is not None and info.host else ""
        processes.append(_Process(name + host, rank, pid, info, events))
    return processes


class _Writer:
    """Turns a trace into packets, a part of a process at a time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._packets = Packets(origin_ns(trace))
        self._messages = self._packets.messages
        self._arrows = find_arrows(trace)
        self._track_of_row = np.zeros(len(self._arrows.rows), dtype=np.int64)
        self._next_uuid = 1  # 0 is the trace's own track

    def chunks(self, progress: Callable[[int, int], None] | None) -> Iterator[Chunk]:
        """All packets of the file, in order."""
        yield self._root()
        processes = _processes(self._trace)
        for place, process in enumerate(processes):
            yield from self._process(place, process)
            if progress is not None:
                progress(place + 1, len(processes))
        yield from self._links()
        yield from self._marks()

    def _root(self) -> Chunk:
        """Ask viewers to keep the processes in order."""
        packet = self._packet(_LINKS)
        packet.track_descriptor.uuid = 0
        if "process_ordering" in packet.track_descriptor.DESCRIPTOR.fields_by_name:  # not in older versions
            packet.track_descriptor.process_ordering = packet.track_descriptor.PROCESS_ORDERING_EXPLICIT
        return self._packets.single(packet)

    def _process(self, place: int, process: _Process) -> Iterator[Chunk]:
        sequence = _FIRST_PROCESS + place
        events = process.events
        tracks = rank_tracks(events)
        communication = np.flatnonzero(self._arrows.rows.rank == process.rank)
        uuid = self._uuids(1 + len(tracks.names))
        self._track_of_row[communication] = uuid + 1 + tracks.track[self._arrows.event[communication]]
        pieces = RankPieces(
            self._messages, events, tracks, self._arrows, communication,
            first_uuid=uuid + 1, origin_ns=self._packets.origin_ns,
        )  # fmt: skip
        first = self._first_packet(sequence)
        pieces.intern(first.interned_data)
        yield self._packets.single(first)
        yield self._packets.single(self._descriptor(sequence, uuid, place, process))
        for number, name in enumerate(tracks.names, uuid + 1):
            yield self._packets.single(self._track(sequence, number, name, uuid))
        ends = (
            len(events) + tracks.track[tracks.moves >> 1]
        )  # rows after the events: slice ends, one per track
        rows = np.where(tracks.moves & 1, ends, tracks.moves >> 1)
        yield from self._packets.many(sequence, tracks.times_ns, rows, pieces.columns())

    def _descriptor(self, sequence: int, uuid: int, place: int, process: _Process) -> Any:
        packet = self._packet(sequence)
        descriptor = packet.track_descriptor
        descriptor.uuid = uuid
        descriptor.sibling_order_rank = place
        descriptor.process.pid = process.pid
        descriptor.process.process_name = process.name
        if process.info is not None:
            software = f"{self._trace.manifest.framework} {process.info.version}"
            labels = (
                f"pid {process.info.pid}" if process.info.pid > 0 else "",
                process.info.backend,
                software,
            )
            descriptor.process.process_labels.extend(clean(label) for label in labels if label)
        return packet

    def _links(self) -> Iterator[Chunk]:
        """A counter of Gbit/s for each link."""
        rates = link_rates(self._trace, self._arrows.rows)
        if not rates:
            return
        event = self._messages.TrackEvent
        yield self._packets.single(self._first_packet(_LINKS))
        parent = self._uuids(1 + len(rates))
        yield self._packets.single(self._track(_LINKS, parent, "links"))
        for uuid, ((source, target), (times_ns, gbps)) in enumerate(rates.items(), parent + 1):
            name = f"{clean(source)} to {clean(target)}" if source != target else f"within {clean(source)}"
            packet = self._track(_LINKS, uuid, name, parent)
            packet.track_descriptor.counter.unit_name = "Gbit/s"
            packet.track_descriptor.counter.y_axis_share_key = "links"
            yield self._packets.single(packet)
            columns = [
                Column.of_messages(np.full(len(gbps), uuid), self._count),
                Column.of_messages(gbps, lambda rate: event(double_counter_value=rate)),
            ]
            yield from self._packets.many(_LINKS, times_ns, np.arange(len(gbps)), columns)

    def _marks(self) -> Iterator[Chunk]:
        """Marks at the ends of arrows whose effect began before its cause."""
        numbers = np.flatnonzero(~self._arrows.on_start)
        if not len(numbers):
            return
        numbers = numbers[np.argsort(self._arrows.at_ns[numbers], kind="stable")]
        rows = self._arrows.rows
        cause = self._arrows.cause[numbers]
        causes = 2 * rows.rank[cause] + (rows.kind[cause] == Kind.SEND)
        first = self._first_packet(_MARKS)
        first.interned_data.event_categories.add(iid=1, name=MARK)
        for value in np.unique(causes).tolist():
            did = "sent" if value % 2 else "arrived last"
            first.interned_data.event_names.add(iid=value + 1, name=f"rank {value // 2} {did}")
        yield self._packets.single(first)
        event = self._messages.TrackEvent
        columns = [
            Column.of_messages(self._track_of_row[self._arrows.effect[numbers]], self._mark),
            Column.of_messages(causes, lambda value: event(name_iid=value + 1)),
            Column.of_messages(numbers, lambda number: event(terminating_flow_ids=[number + 1])),
        ]
        at_ns = self._arrows.at_ns[numbers]
        yield from self._packets.many(_MARKS, at_ns, np.arange(len(numbers)), columns)

    def _count(self, uuid: int) -> Any:
        event = self._messages.TrackEvent
        return event(type=event.TYPE_COUNTER, track_uuid=uuid)

    def _mark(self, uuid: int) -> Any:
        event = self._messages.TrackEvent
        return event(type=event.TYPE_INSTANT, track_uuid=uuid, category_iids=[1])

    def _packet(self, sequence: int) -> Any:
        return self._messages.TracePacket(trusted_packet_sequence_id=sequence)

    def _first_packet(self, sequence: int) -> Any:
        """The first packet of a sequence, which defines its names; its clock needs no conversion by viewers."""
        packet = self._packet(sequence)
        packet.first_packet_on_sequence = True
        packet.sequence_flags = packet.SEQ_INCREMENTAL_STATE_CLEARED
        packet.trace_packet_defaults.timestamp_clock_id = self._messages.BUILTIN_CLOCK_BOOTTIME
        return packet

    def _track(self, sequence: int, uuid: int, name: str, parent: int = 0) -> Any:
        packet = self._packet(sequence)
        descriptor = packet.track_descriptor
        descriptor.uuid = uuid
        descriptor.name = name
        descriptor.sibling_merge_behavior = descriptor.SIBLING_MERGE_BEHAVIOR_NONE
        if parent:
            descriptor.parent_uuid = parent
        return packet

    def _uuids(self, count: int) -> int:
        """Reserve ``count`` track numbers; returns the first."""
        first = self._next_uuid
        self._next_uuid += count
        return first
