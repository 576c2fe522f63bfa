"""Converts a replay into a trace, so that the diagnosis of recordings also works on replays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from headway.graph.build import UPDATE, ComputeSpan, PlacedTransfer
from headway.graph.computation import Part
from headway.replayer.replayer import Replayer
from headway.scheduling.buckets import BucketSchedule
from headway.simulator.simulate import Simulation
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Manifest, RankInfo, Trace

_PASS_KIND = {
    Part.FORWARD: Kind.FORWARD_PASS,
    Part.BACKWARD: Kind.BACKWARD_PASS,
    Part.FINALIZE: Kind.BACKWARD_PASS,
}
_SPAN_KIND = {Part.INPUT: Kind.INPUT, Part.READ: Kind.READ, Part.OPTIMIZER: Kind.OPTIMIZER}


def replayed_trace(replayer: Replayer, result: Simulation) -> Trace:
    """The replayed steps as a trace, without the warm-up (step 0).

    For a folded replay, the trace has only the representative ranks.
    """
    rows: dict[int, list[Event]] = defaultdict(list)
    by_rank: dict[int, list[ComputeSpan]] = defaultdict(list)
    for span in result.graph.spans:
        by_rank[span.rank].append(span)
    for rank, rank_rows in by_rank.items():
        rows[rank] = _main_thread(rank_rows, result) + _steps(rank, result)
    for work in (update_work for update_work in result.graph.works if update_work.kind == UPDATE):
        start_ns, end_ns = (
            int(times[work.operation]) for times in (result.played.start_ns, result.played.end_ns)
        )
        update = _span(Kind.UPDATE, f"bucket {work.bucket}", work.step, start_ns, end_ns, work.bucket)
        rows[work.rank].append(update._replace(stream=Stream.COMMUNICATION))
    for number, collective in enumerate(result.graph.collectives):
        begins = result.played.end_ns[collective.begins]
        ends = result.played.end_ns[collective.ends]
        for rank, begin_ns, end_ns in zip(collective.members, begins.tolist(), ends.tolist(), strict=True):
            rows[rank].append(
                Event(
                    Kind.COLLECTIVE, collective.name, Stream.COMMUNICATION, collective.step, begin_ns,
                    end_ns - begin_ns, begin_ns, "replay", number, collective.size_bytes, collective.bucket,
                    algorithm=collective.selection.algorithm,
                )
            )  # fmt: skip
    for number, transfer in enumerate(result.graph.communications):
        if isinstance(transfer, PlacedTransfer):
            for rank, event in _message(number, transfer, result):
                rows[rank].append(event)
    steps = tuple(sorted(result.graph.boundaries))[1:]
    ranks = result.graph.ranks
    hosts = replayer.cluster.resized(ranks).hosts
    host_of = [host.name for host in hosts for _ in range(host.workers)]
    schedule = result.graph.schedule
    buckets = tuple(b.parameters for b in schedule.buckets) if isinstance(schedule, BucketSchedule) else ()
    infos = tuple(
        RankInfo(
            rank=rank, host=host_of[rank], pid=0, world_size=ranks, backend="replay", version="",
            buckets=buckets,
        )
        for rank in sorted(rows)
    )  # fmt: skip
    return Trace(
        path=Path("replay"),
        manifest=Manifest(world_size=ranks, steps=steps, ranks=infos),
        model=replayer.trace.model,
        events={
            rank: Events.from_rows([row for row in rank_rows if row.step > 0])
            for rank, rank_rows in rows.items()
        },
    )


def _message(number: int, transfer: PlacedTransfer, result: Simulation) -> Iterator[tuple[int, Event]]:
    """The events of a message on both ranks, each from the time of its request."""
    begins, ends = (
        result.played.end_ns[list(operations)].tolist() for operations in (transfer.begins, transfer.ends)
    )
    both = (Kind.SEND, Kind.RECEIVE), transfer.members, reversed(transfer.members), begins, ends
    for kind, rank, peer, begin_ns, end_ns in zip(*both, strict=True):
        yield rank, Event(
            kind, transfer.name, Stream.COMMUNICATION, transfer.step, begin_ns, end_ns - begin_ns, begin_ns, "replay",
            number, transfer.size_bytes, peer=peer,
        )  # fmt: skip


def _main_thread(spans: list[ComputeSpan], result: Simulation) -> list[Event]:
    rows: list[Event] = []
    open_pass: Event | None = None
    before_ns = 0
    for span in spans:
        start_ns = int(result.played.start_ns[span.operation])
        end_ns = int(result.played.end_ns[span.operation])
        under_forward = span.part == Part.OPTIMIZER and span.bucket >= 0
        if open_pass and not under_forward and _PASS_KIND.get(span.part) != open_pass.kind:
            rows.append(open_pass)
            open_pass = None
        if span.waited_for and start_ns > before_ns:
            rows.append(_span(Kind.WAIT, span.wait_name, span.step, before_ns, start_ns, span.bucket))
        if span.part in _PASS_KIND:
            if open_pass is None:
                open_pass = _span(_PASS_KIND[span.part], "", span.step, start_ns, end_ns)
            open_pass = open_pass._replace(duration_ns=end_ns - open_pass.start_ns)
        elif under_forward:
            rows.append(_span(Kind.UPDATE, f"bucket {span.bucket}", span.step, start_ns, end_ns, span.bucket))
        elif span.part in _SPAN_KIND and end_ns > start_ns:
            rows.append(_span(_SPAN_KIND[span.part], span.part, span.step, start_ns, end_ns))
        before_ns = end_ns
    return rows + ([open_pass] if open_pass else [])


def _steps(rank: int, result: Simulation) -> list[Event]:
    rows = []
    before_ns = 0
    for step in sorted(result.graph.boundaries):
        if (boundary := result.graph.boundaries[step][rank]) < 0:
            continue  # this rank has fewer steps
        end_ns = int(result.played.end_ns[boundary])
        rows.append(_span(Kind.STEP, f"step {step}", step, before_ns, end_ns))
        before_ns = end_ns
    return rows


def _span(kind: str, name: str, step: int, start_ns: int, end_ns: int, bucket: int = -1) -> Event:
    return Event(kind, name, Stream.COMPUTE, step, start_ns, end_ns - start_ns, bucket=bucket)
