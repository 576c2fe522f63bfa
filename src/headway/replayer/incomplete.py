"""Prepares incomplete traces, such as most imported ones, for replay, and refuses those that cannot be replayed.

A trace without parameter names still shows when how many bytes were reduced. Each recorded bucket then stands for one
parameter, whose gradient was ready when the bucket was requested. Such a replay keeps the recorded buckets: clusters,
rates and ranks may change, but no plan can be applied. Waits that replay cannot simulate keep their recorded duration.
``lacks`` lists what is missing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headway import intervals
from headway.collectives.algorithms import ALL_REDUCE, KINDS
from headway.errors import TraceError
from headway.model import ModelSpec, ParameterSpec
from headway.strategies.registry import as_recorded
from headway.trace.events import WORK, Event, Events, Kind, Stream, inner_messages, is_message
from headway.trace.format import Trace

ADVICE = "Record a job that constructs DistributedDataParallel with headway record."
MOST_WAITS = 0.05  # share of the step that may be spent on communication that plans do not control
AT_ONCE_NS = 200_000  # a wait that ends this close to a collective was for it
_BACKWARDS = (Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.OPERATOR)
_OPERATORS = (Kind.FORWARD, Kind.BACKWARD)  # importers attribute operators and kernels to these
_MADE_ANEW = (Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.GRADIENT_READY, Kind.WAIT)
Key = tuple[str, str, int]  # of a collective, on all its ranks: name, group, sequence


def check_takes_plans(trace: Trace) -> None:
    """Raise TraceError unless plans can be applied to ``trace``: it needs gradient buckets and computation."""
    info = trace.manifest.ranks[0]
    if info.fully_sharded:
        raise TraceError(
            "plans do not support models sharded with fully_shard (FSDP2)",
            got="parameters gathered and gradients scattered layer by layer",
            expected="a job that constructs DistributedDataParallel",
        )
    if info.other_models:
        raise TraceError(
            "plans do not support jobs that train several wrapped models",
            got=f"{', '.join(info.other_models)} in addition to the recorded one",
            fix="Record a job that trains a single model.",
        )
    check_not_averaged(trace)
    check_pipeline(trace)
    check_messages(trace)
    if not trace.stages and (share := _script_wait_share(trace)) > MOST_WAITS:
        raise TraceError(
            "plans do not support jobs that wait for the script's own asynchronous communication",
            got=f"such waits take {share:.0%} of the step",
            expected=f"at most {MOST_WAITS:.0%}",
            fix="Use an optimizer that does not communicate (ZeroRedundancyOptimizer broadcasts its updates), or "
            "leave the job as it is.",
        )
    if not trace.model.parameters:
        raise TraceError("no plan can be applied to a trace without parameter names", fix=ADVICE)
    for rank, events in sorted(trace.events.items()):
        if not events.of_kind(*_BACKWARDS).duration_ns.sum():
            raise TraceError(
                "no plan can be applied to a trace without computation",
                got=f"no backward on rank {rank}",
                fix="Record a job that calls backward() on every rank.",
            )


def check_pipeline(trace: Trace) -> None:
    """Raise TraceError for pipelines that replay does not support."""
    stages = 1 + max((int(events.stage.max(initial=-1)) for events in trace.events.values()), default=-1)
    several = trace.stages_a_rank > 1
    complete = trace.stages and len(trace.events) == trace.world_size
    complete = complete and (several or trace.world_size % stages == 0)
    if stages and not (complete and all(stage.parameters for stage in trace.stages)):
        raise TraceError(
            "replay does not support this pipeline",
            got=f"passes and messages of {stages} stages on {trace.world_size} ranks",
            expected="a recording of all ranks, with one stage per rank and equally many ranks per stage, or several "
            "stages per rank and one rank per stage",
            fix="Use headway diagnose; its breakdown and links are valid for this pipeline too.",
        )


def check_messages(trace: Trace) -> None:
    """Raise TraceError if ranks wait for point-to-point messages of the script, which replay would leave out."""
    if trace.stages or not any(
        (is_message(events) & ~inner_messages(events)).any() for events in trace.events.values()
    ):
        return
    if (share := _script_wait_share(trace)) > MOST_WAITS:
        raise TraceError(
            "replay does not support point-to-point messages of the script",
            got=f"waits for the script's communication take {share:.0%} of the step",
            expected=f"at most {MOST_WAITS:.0%}",
            fix="Use headway diagnose, or record a job that only waits for collectives.",
        )


def check_not_averaged(trace: Trace) -> None:
    """Raise TraceError if ranks averaged their models in groups: replay needs synchronous steps."""
    if trace.rounds:
        raise TraceError(
            "replay does not support recordings of jobs that average models in groups of ranks",
            got=f"rounds of averaging on {len(trace.rounds)} ranks",
            expected="a recording under DistributedDataParallel",
            fix="Use headway diagnose for this recording. To replay or optimize groups, record the job under DDP and use "
            "headway replay --plan or headway optimize --allow asynchronous.",
        )


def check_same_steps(trace: Trace) -> None:
    """Raise TraceError if live-recorded ranks took different numbers of steps, which means they were not in sync.

    A difference of one step is allowed, since a job may end during a step. Imported profiles may begin and end anywhere.
    """
    if any(info.source for info in trace.manifest.ranks):
        return
    counts = {rank: len(events.whole_steps) for rank, events in trace.events.items()}
    most, least = max(counts, key=lambda rank: counts[rank]), min(counts, key=lambda rank: counts[rank])
    if counts[most] - counts[least] > 1:
        raise TraceError(
            "replay needs the same number of steps on every rank",
            got=f"{counts[most]} steps on rank {most}, {counts[least]} on rank {least}",
            fix="Record a part of the job in which every rank takes the same steps (--steps A:B).",
        )


def _script_wait_share(trace: Trace) -> float:
    """The share of the recorded steps spent in waits of the script or its optimizer, which replay does not simulate.

    A wait for a work that begins inside a simulated wait belongs to that: it is the call of a blocking collective, which
    on a busy machine returns after its collective is done.
    """
    waited_ns = 0
    for events in trace.events.values():
        rows = events.of_kind(Kind.WAIT)
        of_works = rows.name == WORK
        laid_out = intervals.union(rows.start_ns[~of_works], rows.end_ns[~of_works])
        apart = of_works & ~intervals.inside(laid_out, rows.start_ns)
        script_waits = intervals.union(rows.start_ns[apart], rows.end_ns[apart])
        waited_ns += intervals.length_ns(script_waits) - intervals.length_ns(
            intervals.intersect(script_waits, laid_out)
        )
    steps_ns = sum(int(events.of_kind(Kind.STEP).duration_ns.sum()) for events in trace.events.values())
    return waited_ns / steps_ns if steps_ns else 0.0


def lacks(recorded: Trace, replayed: Trace) -> tuple[str, ...]:
    """Notes on what ``recorded`` lacks for replay (as ``replayed``), and what to record instead."""
    notes = []
    if not recorded.model.parameters:
        notes.append(
            "The trace has no parameter names, so its buckets are replayed as recorded and no plan can be applied. "
            f"{ADVICE}"
        )
    if len(replayed.steps) < len(recorded.steps):
        notes.append(
            f"Only {len(replayed.steps)} of {len(recorded.steps)} steps have the usual buckets on all ranks; the rest "
            "is left out."
        )
    if recorded.missing_ranks:
        notes.append(
            f"Only {len(recorded.events)} of {recorded.world_size} ranks were recorded. The missing ones are assumed to "
            "behave alike, and waiting for them counts as communication. Import or record every rank."
        )
    return tuple(notes)


def of_recorded_buckets(trace: Trace) -> Trace:
    """``trace`` with one parameter per bucket, and only the steps with the usual buckets.

    Collectives of some ranks are not buckets; those that all their members waited for are replayed. Raises TraceError if
    gradients were not all-reduced, or their sizes are unknown.
    """
    if any(len(events.of_kind(Kind.PUSH)) for events in trace.events.values()):
        raise TraceError(
            "replay does not support other frameworks' parameter servers", got="pushes and pulls",
            expected="gradients that are all-reduced",
        )  # fmt: skip
    reduced = {rank: _reduced(trace, events) for rank, events in trace.events.items()}
    awaited = _awaited(trace)
    usual, steps = _usual(trace, reduced, awaited)
    names = [f"bucket {index}" for index in range(len(usual))]
    parameters = tuple(
        ParameterSpec(name=name, shape=(size_bytes,), dtype="uint8", module="")
        for name, size_bytes in zip(names, usual, strict=True)
    )
    ranks = tuple(
        info.model_copy(
            update={"strategy": {as_recorded().name: as_recorded().model_dump(exclude_unset=True)}}
        )
        for info in trace.manifest.ranks
    )
    return replace(
        trace,
        manifest=trace.manifest.model_copy(update={"ranks": ranks, "steps": steps}),
        model=ModelSpec(parameters=parameters, ready_order=tuple(names)),
        events={
            rank: _laid_bare(event, reduced[rank], steps, awaited[rank])
            for rank, event in trace.events.items()
        },
    )


def _no_gradients(trace: Trace) -> TraceError:
    """The error for a trace in which no gradients are reduced among all ranks."""
    if any(info.fully_sharded for info in trace.manifest.ranks):
        return TraceError(
            "replay does not support models sharded with fully_shard (FSDP2) yet",
            got="parameters gathered and gradients scattered layer by layer",
            expected="gradients that are all-reduced",
            fix="Use headway diagnose.",
        )
    if any((events.bucket >= 0).any() for events in trace.events.values()):
        return TraceError(
            "replay does not support gradients that are reduced in subgroups of ranks",
            got=f"buckets in groups of fewer than {trace.world_size} ranks",
            expected="gradients that all ranks reduce together",
            fix="Use headway diagnose.",
        )
    return TraceError(
        "the trace has no gradient collectives, so there is nothing to replay",
        fix=f"Record a job with several ranks, from the first backward on. {ADVICE}",
    )


def _usual(
    trace: Trace,
    reduced: Mapping[int, Mapping[int, Sequence[Event]]],
    awaited: Mapping[int, Mapping[Key, Event]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bucket sizes (bytes) of most steps, and the steps that have them on all ranks.

    There are no buckets if ranks only exchange activations.
    """
    sizes = {
        (rank, step): tuple(row.size_bytes for row in rows)
        for rank, steps in reduced.items()
        for step, rows in steps.items()
    }
    if not sizes and any(awaited.values()):
        return (), trace.steps
    if not sizes:
        raise _no_gradients(trace)
    usual = Counter(sizes.values()).most_common(1)[0][0]
    if min(usual) < 0:
        raise TraceError(
            "the sizes of collectives are missing from the trace, so it cannot be replayed",
            fix="Record with torch.profiler.profile(record_shapes=True), or headway record.",
        )
    steps = tuple(
        step for step in trace.steps if all(sizes.get((rank, step)) == usual for rank in trace.events)
    )
    if not steps:
        raise TraceError(
            "no step has the same buckets on all ranks, so no step can be replayed",
            fix="Record the same steps on every rank, after the first two (in which DDP rebuilds its buckets).",
        )
    return usual, steps


def _reduced(trace: Trace, events: Events) -> dict[int, list[Event]]:
    """The gradient collectives over all ranks by step, in the order of their requests."""
    by_step: dict[int, list[Event]] = {}
    for row in events.of_kind(Kind.COLLECTIVE):
        if row.bucket < 0 or len(trace.members(row.group)) < trace.world_size:
            continue
        if row.name != ALL_REDUCE:
            raise TraceError(
                "replay of a trace without parameter names requires all-reduced gradients",
                got=f"a {row.name} of gradients", expected=ALL_REDUCE,
            )  # fmt: skip
        by_step.setdefault(row.step, []).append(row)
    for rows in by_step.values():
        rows.sort(key=lambda row: row.bucket)
    return by_step


def _awaited(trace: Trace) -> dict[int, dict[Key, Event]]:
    """By rank, the waits for collectives other than gradients, if all members waited for them."""
    by_rank: dict[int, dict[Key, Event]] = {}
    for rank, events in trace.events.items():
        rank_waits = by_rank[rank] = {}
        waits = sorted(events.of_kind(Kind.WAIT), key=lambda row: row.end_ns)
        ends_ns = [row.end_ns for row in waits]
        for row in events.of_kind(Kind.COLLECTIVE):
            together = row.name in KINDS and set(trace.members(row.group)) <= set(trace.events)
            if row.bucket >= 0 or row.size_bytes < 0 or not together:
                continue
            first = bisect_left(ends_ns, row.end_ns - AT_ONCE_NS)
            last = bisect_right(ends_ns, row.end_ns + AT_ONCE_NS)
            for wait in waits[first:last]:
                if wait.start_ns < row.end_ns:
                    rank_waits[_key(row)] = wait
    by = Counter(key for rank_waits in by_rank.values() for key in rank_waits)
    return {
        rank: {key: wait for key, wait in rank_waits.items() if by[key] == len(trace.members(key[1]))}
        for rank, rank_waits in by_rank.items()
    }


def _laid_bare(
    events: Events, reduced: dict[int, list[Event]], steps: Sequence[int], awaited: dict[Key, Event]
) -> Events:
    """Rewrite ``steps`` like a native recording: two passes that contain operators."""
    rows: list[Event] = []
    for step in steps:
        step_rows = list(events.of_step(step))
        asked_ns = _asked_ns(step_rows, awaited)
        for row in step_rows:
            if row.kind in _OPERATORS:
                rows.append(row._replace(kind=Kind.OPERATOR))
            elif row.kind == Kind.COLLECTIVE:
                rows += _of_collective(row, row in reduced.get(step, ()), awaited, asked_ns)
            elif row.kind not in _MADE_ANEW:
                rows.append(row)
        rows += _passes(step, step_rows, reduced.get(step, ()))
    return Events.from_rows(rows)


def _key(row: Event) -> Key:
    return row.name, row.group, row.sequence


def _asked_ns(rows: Sequence[Event], awaited: dict[Key, Event]) -> dict[Key, int]:
    """The request time of each awaited collective: the beginning of its wait.

    Collectives that share a wait are spaced a nanosecond apart, in the order of their requests, because a collective and
    its wait are matched by time.
    """
    collectives = [row for row in rows if row.kind == Kind.COLLECTIVE]
    others_ns = {row.enqueue_ns for row in collectives if _key(row) not in awaited}
    request_ns: dict[Key, int] = {}
    last_ns = -1
    for at_ns, _, key in sorted(
        (max(awaited[key].start_ns, row.enqueue_ns), row.enqueue_ns, key)
        for row in collectives
        if (key := _key(row)) in awaited
    ):
        last_ns = max(at_ns, last_ns + 1)
        while last_ns in others_ns:
            last_ns += 1
        request_ns[key] = last_ns
    return request_ns


def _of_collective(
    row: Event, is_bucket: bool, awaited: dict[Key, Event], asked_ns: dict[Key, int]
) -> list[Event]:
    """The collective in the form that replay reads, and its wait if it has one."""
    if is_bucket:
        return [row]
    row = row._replace(bucket=-1)
    begins_ns = asked_ns.get(_key(row))
    if begins_ns is None:
        return [row]
    waits = _span(Kind.WAIT, row.step, begins_ns, max(begins_ns, awaited[_key(row)].end_ns), name=row.name)
    return [row._replace(enqueue_ns=begins_ns), waits]


def _passes(step: int, rows: Sequence[Event], buckets: Sequence[Event]) -> list[Event]:
    """Infer the passes: backward computes until the wait for its last bucket begins, and ends with that wait."""
    window = next(row for row in rows if row.kind == Kind.STEP)
    if not buckets:
        return _passes_alone(step, rows, window)
    asked_ns = max(row.enqueue_ns for row in buckets)
    updates = [row.start_ns for row in rows if row.kind == Kind.OPTIMIZER and row.start_ns > asked_ns]
    until_ns = min(updates, default=window.end_ns)
    last_ns = max(row.end_ns for row in buckets)
    waits = [
        row
        for row in rows
        if row.kind == Kind.WAIT and row.end_ns > asked_ns and row.start_ns < min(last_ns, until_ns)
    ]
    begins = [row.start_ns for row in rows if row.kind == Kind.BACKWARD and row.start_ns <= asked_ns]
    shares = [row.end_ns for row in rows if row.kind == Kind.BACKWARD and row.start_ns < until_ns]
    computed_ns = min([row.start_ns for row in waits] or [max([asked_ns, *shares])])
    begins_ns = min([*begins, *(row.enqueue_ns for row in buckets)])
    begins_ns = min(max(begins_ns, window.start_ns), computed_ns)
    ends_ns = max([computed_ns, asked_ns, *(row.end_ns for row in waits)])
    inputs = [row.end_ns for row in rows if row.kind == Kind.INPUT and row.end_ns <= begins_ns]
    ready_ns = {row.bucket: row.start_ns for row in rows if row.kind == Kind.GRADIENT_READY}
    ready = [
        _span(Kind.GRADIENT_READY, step, min(max(at_ns, begins_ns), computed_ns), name=f"bucket {index}")
        for index, row in enumerate(buckets)
        for at_ns in [ready_ns.get(row.bucket, row.enqueue_ns)]
    ]
    return [
        _span(Kind.FORWARD_PASS, step, max([window.start_ns, *inputs]), begins_ns),
        _span(Kind.BACKWARD_PASS, step, begins_ns, ends_ns),
        _span(Kind.BACKWARD, step, begins_ns, computed_ns),
        *ready,
        *(row._replace(name="gradients") for row in waits),
    ]


def _passes_alone(step: int, rows: Sequence[Event], window: Event) -> list[Event]:
    """Infer the passes of a step that reduces no gradients from the recorded parts of backward."""
    shares = [row for row in rows if row.kind == Kind.BACKWARD]
    begins_ns = min((row.start_ns for row in shares), default=window.end_ns)
    ends_ns = max((row.end_ns for row in shares), default=window.end_ns)
    inputs = [row.end_ns for row in rows if row.kind == Kind.INPUT and row.end_ns <= begins_ns]
    return [
        _span(Kind.FORWARD_PASS, step, max([window.start_ns, *inputs]), begins_ns),
        _span(Kind.BACKWARD_PASS, step, begins_ns, ends_ns),
        _span(Kind.BACKWARD, step, begins_ns, ends_ns),
    ]


def _span(kind: str, step: int, start_ns: int, end_ns: int | None = None, *, name: str = "") -> Event:
    return Event(kind, name, Stream.COMPUTE, step, start_ns, 0 if end_ns is None else end_ns - start_ns)
