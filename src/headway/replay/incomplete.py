"""What a replay makes of traces that lack something, as most imported ones do.

One that names no parameters still says which bytes were reduced when: each recorded bucket is then taken for one
parameter whose gradient was ready when the bucket was asked for. Buckets stay as they were recorded, so that clusters,
rates and ranks may change, and plans may not. What is missing is said (``lacks``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from headway.collectives.algorithms import KINDS
from headway.errors import TraceError
from headway.model import ModelSpec, ParameterSpec
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Trace

_OPERATORS = (Kind.FORWARD, Kind.BACKWARD)  # what importers know operators and kernels to be part of
_MADE_ANEW = (Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.GRADIENT_READY)
AS_RECORDED = DistributedDataParallelStrategy(bucket_cap_mb=0)  # a bucket of every "parameter"
RECORD = "Record the job with headway record, or one that constructs DistributedDataParallel."


def lacks(trace: Trace) -> tuple[str, ...]:
    """What a replay of ``trace`` has to do without, and what to record instead; a sentence each."""
    said = []
    if not trace.model.parameters:
        said.append(
            "The trace names no parameters: its buckets are replayed as they were recorded, and no plan can be laid "
            f"over it. {RECORD}"
        )
    if trace.missing_ranks:
        said.append(
            f"Only {len(trace.events)} of {trace.world_size} ranks were recorded: the others are taken to do the same, "
            "and what these waited for others counts as communication. Import or record every rank."
        )
    return tuple(said)


def of_recorded_buckets(trace: Trace) -> Trace:
    """``trace`` with its buckets as parameters, without the steps that have others than most.

    Raises TraceError where gradients were not all-reduced, or nothing tells how many bytes they have.
    """
    if any(len(events.of_kind(Kind.PUSH)) for events in trace.events.values()):
        raise TraceError(
            "replay does not lay out other frameworks' parameter servers", got="pushes and pulls",
            expected="gradients that are all-reduced",
        )  # fmt: skip
    reduced = {rank: _reduced(events) for rank, events in trace.events.items()}
    sizes = {
        (rank, step): tuple(row.size_bytes for row in rows)
        for rank, steps in reduced.items()
        for step, rows in steps.items()
    }
    if not sizes:
        raise TraceError(
            "the trace holds no collective of gradients, so there is nothing to replay",
            fix=f"Record a job of several ranks, from the first backward on. {RECORD}",
        )
    usual = Counter(sizes.values()).most_common(1)[0][0]
    if min(usual) < 0:
        raise TraceError(
            "the trace does not say how many bytes its collectives carry, so they cannot be replayed",
            fix="Record with torch.profiler.profile(record_shapes=True), or headway record.",
        )
    steps = tuple(
        step for step in trace.steps if all(sizes.get((rank, step)) == usual for rank in trace.events)
    )
    if not steps:
        raise TraceError(
            "no step has the same buckets on all ranks, so none can be replayed",
            fix="Record the same steps on every rank, after the first two, in which DDP still makes its buckets.",
        )
    names = [f"bucket {index}" for index in range(len(usual))]
    parameters = tuple(
        ParameterSpec(name=name, shape=(size_bytes,), dtype="uint8", module="")
        for name, size_bytes in zip(names, usual, strict=True)
    )
    ranks = tuple(
        info.model_copy(update={"strategy": {AS_RECORDED.name: AS_RECORDED.model_dump(exclude_unset=True)}})
        for info in trace.manifest.ranks
    )
    return replace(
        trace,
        manifest=trace.manifest.model_copy(update={"ranks": ranks, "steps": steps}),
        model=ModelSpec(parameters=parameters, ready_order=tuple(names)),
        events={rank: _laid_bare(own, reduced[rank], steps) for rank, own in trace.events.items()},
    )


def _reduced(events: Events) -> dict[int, list[Event]]:
    """The collectives of gradients of each step, in the order in which they were asked for."""
    found: dict[int, list[Event]] = {}
    for row in events.of_kind(Kind.COLLECTIVE):
        if row.bucket < 0:
            continue
        if row.name != "all_reduce":
            raise TraceError(
                "replay lays out gradients that are all-reduced, of traces without parameters",
                got=f"a {row.name} of gradients", expected="all_reduce",
            )  # fmt: skip
        found.setdefault(row.step, []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row.bucket)
    return found


def _laid_bare(events: Events, reduced: dict[int, list[Event]], steps: Sequence[int]) -> Events:
    """``steps`` as a recording of our own would have them: two passes, in which there are operators."""
    rows: list[Event] = []
    for step in steps:
        own = list(events.of_step(step))
        waits = [row for row in own if row.kind == Kind.WAIT]
        for row in own:
            if row.kind in _OPERATORS:
                rows.append(row._replace(kind=Kind.OPERATOR))
            elif row.kind == Kind.COLLECTIVE and row.bucket < 0 and row.name in KINDS:
                rows += _awaited(row, waits)
            elif row.kind not in _MADE_ANEW:
                rows.append(row)
        rows += _passes(step, own, reduced[step])
    return Events.from_rows(rows)


def _awaited(collective: Event, waits: Sequence[Event]) -> list[Event]:
    """A collective that is not of gradients, and the wait for it where computation stood still meanwhile.

    Importers know that a rank waited, and not what for.
    """
    under = [row for row in waits if row.end_ns > collective.enqueue_ns and row.start_ns < collective.end_ns]
    if not under or collective.size_bytes < 0:
        return [collective]
    begins_ns = max(collective.enqueue_ns, under[0].start_ns)
    wait = _span(Kind.WAIT, collective.step, begins_ns, under[-1].end_ns, name=collective.name)
    return [collective._replace(enqueue_ns=begins_ns), wait]


def _passes(step: int, rows: Sequence[Event], buckets: Sequence[Event]) -> list[Event]:
    """Backward lasts until the wait for its last bucket ends, and computes until that wait begins."""
    window = next(row for row in rows if row.kind == Kind.STEP)
    last_ns = max(row.enqueue_ns for row in buckets)
    waits = sorted((row.start_ns, row.end_ns) for row in rows if row.kind == Kind.WAIT)
    wait = next((each for each in waits if each[1] > last_ns), None)
    share_ends = [row.end_ns for row in rows if row.kind == Kind.BACKWARD]
    computed_ns = wait[0] if wait else max([last_ns, *share_ends])
    begins_ns = min(
        [row.start_ns for row in rows if row.kind == Kind.BACKWARD] + [row.enqueue_ns for row in buckets]
    )
    begins_ns = min(max(begins_ns, window.start_ns), computed_ns)
    passed = _span(Kind.BACKWARD_PASS, step, begins_ns, max(computed_ns, last_ns, wait[1] if wait else 0))
    ready_ns = {row.bucket: row.start_ns for row in rows if row.kind == Kind.GRADIENT_READY}
    ready = [
        _span(Kind.GRADIENT_READY, step, min(max(at_ns, begins_ns), computed_ns), name=f"bucket {index}")
        for index, row in enumerate(buckets)
        for at_ns in [ready_ns.get(row.bucket, row.enqueue_ns)]
    ]
    share = _span(Kind.BACKWARD, step, begins_ns, computed_ns)
    inputs = [row.end_ns for row in rows if row.kind == Kind.INPUT and row.end_ns <= begins_ns]
    forward = _span(Kind.FORWARD_PASS, step, max([window.start_ns, *inputs]), begins_ns)
    return [forward, passed, share, *ready]


def _span(kind: str, step: int, start_ns: int, end_ns: int | None = None, *, name: str = "") -> Event:
    return Event(kind, name, Stream.COMPUTE, step, start_ns, 0 if end_ns is None else end_ns - start_ns)
