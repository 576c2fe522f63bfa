"""The replay of incomplete traces, as most imported ones are.

A trace that names no parameters still says how many bytes were reduced, and when: each recorded bucket is then taken
for one parameter whose gradient was ready when the bucket was requested. Buckets stay as they were recorded, so
clusters, rates and ranks may change, but plans may not. Waits that the replay cannot simulate keep their recorded
duration. ``lacks`` says what is missing.
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
MOST_WAITS = 0.05  # of the step, for communication that no plan decides about
AT_ONCE_NS = 200_000  # within which whoever waited for a collective goes on after it
_BACKWARDS = (Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.OPERATOR)
_OPERATORS = (Kind.FORWARD, Kind.BACKWARD)  # what importers know operators and kernels to be part of
_MADE_ANEW = (Kind.FORWARD_PASS, Kind.BACKWARD_PASS, Kind.GRADIENT_READY, Kind.WAIT)
Key = tuple[str, str, int]  # of a collective, on all its ranks: name, group, sequence


def check_takes_plans(trace: Trace) -> None:
    """Raise TraceError unless ``trace`` has all that plans decide about, and the computation that can hide it."""
    info = trace.manifest.ranks[0]
    if info.fully_sharded:
        raise TraceError(
            "no plan is made for a model that is sharded with fully_shard (FSDP2)",
            got="parameters gathered and gradients scattered a layer at a time",
            expected="a job that constructs DistributedDataParallel",
        )
    if info.other_models:
        raise TraceError(
            "no plan is made for a job that trains several wrapped models",
            got=f"{', '.join(info.other_models)} in addition to the recorded one",
            fix="Record a job that trains one of them.",
        )
    check_not_averaged(trace)
    check_pipeline(trace)
    check_messages(trace)
    if not trace.stages and (share := _waits_of_its_own(trace)) > MOST_WAITS:
        raise TraceError(
            "no plan is made for a job that waits for asynchronous communication of its own, which replay does not "
            "support",
            got=f"such waits for {share:.0%} of the step",
            expected=f"at most {MOST_WAITS:.0%}",
            fix="Use an optimizer that does not communicate (ZeroRedundancyOptimizer broadcasts what it updates), or "
            "leave the job as it is.",
        )
    if not trace.model.parameters:
        raise TraceError("the trace names no parameters, so no plan can be applied to it", fix=ADVICE)
    for rank, events in sorted(trace.events.items()):
        if not events.of_kind(*_BACKWARDS).duration_ns.sum():
            raise TraceError(
                "the trace shows no computation, so no plan can be applied to it",
                got=f"no backward on rank {rank}",
                fix="Record a job that calls backward() on every rank.",
            )


def check_pipeline(trace: Trace) -> None:
    """Raise TraceError where models are cut into stages in a way that replay does not lay out."""
    stages = 1 + max((int(events.stage.max(initial=-1)) for events in trace.events.values()), default=-1)
    several = trace.stages_a_rank > 1
    whole = trace.stages and len(trace.events) == trace.world_size
    whole = whole and (several or trace.world_size % stages == 0)
    if stages and not (whole and all(stage.parameters for stage in trace.stages)):
        raise TraceError(
            "replay does not support this pipeline",
            got=f"passes and messages of {stages} stages on {trace.world_size} ranks",
            expected="a recording of all ranks, with one stage a rank and as many ranks for each stage, or several "
            "stages a rank and one rank for each",
            fix="Use headway diagnose: its breakdown and its links are valid for this pipeline too.",
        )


def check_messages(trace: Trace) -> None:
    """Raise TraceError where ranks wait for messages that are of no collective: replay would leave them out."""
    if trace.stages or not any(
        (is_message(events) & ~inner_messages(events)).any() for events in trace.events.values()
    ):
        return
    if (share := _waits_of_its_own(trace)) > MOST_WAITS:
        raise TraceError(
            "replay does not support messages that a script sends from rank to rank",
            got=f"waits for asynchronous communication of the script for {share:.0%} of the step",
            expected=f"at most {MOST_WAITS:.0%}",
            fix="Use headway diagnose, or record a job whose ranks wait for collectives only.",
        )


def check_not_averaged(trace: Trace) -> None:
    """Raise TraceError where ranks averaged their models in groups: replay has no steps that all of them finish."""
    if trace.rounds:
        raise TraceError(
            "replay does not support recordings of jobs whose ranks average their models in groups",
            got=f"rounds of averaging on {len(trace.rounds)} ranks",
            expected="a recording under DistributedDataParallel",
            fix="Use headway diagnose for this one. To replay or optimize groups, record the job under "
            "DistributedDataParallel, and use headway replay --plan or headway optimize --allow asynchronous.",
        )


def check_same_steps(trace: Trace) -> None:
    """Raise TraceError if ranks that were recorded live took different numbers of steps: they did not step together.

    A difference of one step remains if a job ends during a step. Other tools' profiles may begin and end anywhere.
    """
    if any(info.source for info in trace.manifest.ranks):
        return
    counts = {rank: len(events.whole_steps) for rank, events in trace.events.items()}
    most, least = max(counts, key=lambda rank: counts[rank]), min(counts, key=lambda rank: counts[rank])
    if counts[most] - counts[least] > 1:
        raise TraceError(
            "replay needs the same number of steps on every rank",
            got=f"{counts[most]} steps of rank {most}, {counts[least]} of rank {least}",
            fix="Record a part of the job in which every rank takes the same steps (--steps A:B).",
        )


def _waits_of_its_own(trace: Trace) -> float:
    """The share of the recorded steps in which the script, or its optimizer, waits for works by itself.

    A wait for a work that begins within a wait that is laid out belongs to that: the call of a blocking collective,
    which on a busy machine returns later than its collective is done.
    """
    waited_ns = 0
    for events in trace.events.values():
        rows = events.of_kind(Kind.WAIT)
        of_works = rows.name == WORK
        known = intervals.union(rows.start_ns[~of_works], rows.end_ns[~of_works])
        apart = of_works & ~intervals.inside(known, rows.start_ns)
        own = intervals.union(rows.start_ns[apart], rows.end_ns[apart])
        waited_ns += intervals.length_ns(own) - intervals.length_ns(intervals.intersect(own, known))
    steps_ns = sum(int(events.of_kind(Kind.STEP).duration_ns.sum()) for events in trace.events.values())
    return waited_ns / steps_ns if steps_ns else 0.0


def lacks(recorded: Trace, replayed: Trace) -> tuple[str, ...]:
    """What ``recorded`` lacks for its replay, as ``replayed``, and what to record instead."""
    said = []
    if not recorded.model.parameters:
        said.append(
            "The trace names no parameters: its buckets are replayed as they were recorded, and no plan can be applied "
            f"to it. {ADVICE}"
        )
    if len(replayed.steps) < len(recorded.steps):
        said.append(
            f"Only {len(replayed.steps)} of {len(recorded.steps)} steps have the usual buckets on all ranks; the "
            "others are left out."
        )
    if recorded.missing_ranks:
        said.append(
            f"Only {len(recorded.events)} of {recorded.world_size} ranks were recorded: the others are assumed to do "
            "the same, and waiting for them counts as communication. Import or record every rank."
        )
    return tuple(said)


def of_recorded_buckets(trace: Trace) -> Trace:
    """``trace`` with its buckets as parameters, without the steps whose buckets differ from most.

    Collectives of a part of the ranks are no buckets; those that all of their members waited for are replayed. Raises
    TraceError where gradients were not all-reduced, or nothing tells how many bytes they have.
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
    """What to say of a trace in which no gradients of all ranks are reduced, and nothing is waited for by all."""
    if any(info.fully_sharded for info in trace.manifest.ranks):
        return TraceError(
            "replay does not support models that are sharded with fully_shard (FSDP2) yet",
            got="parameters gathered and gradients scattered a layer at a time",
            expected="gradients that are all-reduced",
            fix="Use headway diagnose.",
        )
    if any((events.bucket >= 0).any() for events in trace.events.values()):
        return TraceError(
            "replay does not support gradients that are reduced in groups of some ranks",
            got=f"buckets in groups of fewer than {trace.world_size} ranks",
            expected="gradients that all ranks reduce together",
            fix="Use headway diagnose.",
        )
    return TraceError(
        "the trace holds no collective of gradients, so there is nothing to replay",
        fix=f"Record a job of several ranks, from the first backward on. {ADVICE}",
    )


def _usual(
    trace: Trace,
    reduced: Mapping[int, Mapping[int, Sequence[Event]]],
    awaited: Mapping[int, Mapping[Key, Event]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bytes of the buckets that most steps have, and the steps that have them on all ranks.

    There are none where ranks exchange activations only, for which they wait.
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
            "the trace does not say how many bytes its collectives carry, so they cannot be replayed",
            fix="Record with torch.profiler.profile(record_shapes=True), or headway record.",
        )
    steps = tuple(
        step for step in trace.steps if all(sizes.get((rank, step)) == usual for rank in trace.events)
    )
    if not steps:
        raise TraceError(
            "no step has the same buckets on all ranks, so none can be replayed",
            fix="Record the same steps on every rank, after the first two, in which DDP still rebuilds its buckets.",
        )
    return usual, steps


def _reduced(trace: Trace, events: Events) -> dict[int, list[Event]]:
    """The collectives of gradients of all ranks in each step, in the order in which they were asked for."""
    found: dict[int, list[Event]] = {}
    for row in events.of_kind(Kind.COLLECTIVE):
        if row.bucket < 0 or len(trace.members(row.group)) < trace.world_size:
            continue
        if row.name != ALL_REDUCE:
            raise TraceError(
                "in traces without parameters, replay supports only gradients that are all-reduced",
                got=f"a {row.name} of gradients", expected=ALL_REDUCE,
            )  # fmt: skip
        found.setdefault(row.step, []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row.bucket)
    return found


def _awaited(trace: Trace) -> dict[int, dict[Key, Event]]:
    """On each rank, the wait for each collective that is not of gradients, where every rank stood still for it."""
    found: dict[int, dict[Key, Event]] = {}
    for rank, events in trace.events.items():
        own = found[rank] = {}
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
                    own[_key(row)] = wait
    by = Counter(key for own in found.values() for key in own)
    return {
        rank: {key: wait for key, wait in own.items() if by[key] == len(trace.members(key[1]))}
        for rank, own in found.items()
    }


def _laid_bare(
    events: Events, reduced: dict[int, list[Event]], steps: Sequence[int], awaited: dict[Key, Event]
) -> Events:
    """``steps`` as a recording of our own would have them: two passes, in which there are operators."""
    rows: list[Event] = []
    for step in steps:
        own = list(events.of_step(step))
        asked_ns = _asked_ns(own, awaited)
        for row in own:
            if row.kind in _OPERATORS:
                rows.append(row._replace(kind=Kind.OPERATOR))
            elif row.kind == Kind.COLLECTIVE:
                rows += _of_collective(row, row in reduced.get(step, ()), awaited, asked_ns)
            elif row.kind not in _MADE_ANEW:
                rows.append(row)
        rows += _passes(step, own, reduced.get(step, ()))
    return Events.from_rows(rows)


def _key(row: Event) -> Key:
    return row.name, row.group, row.sequence


def _asked_ns(rows: Sequence[Event], awaited: dict[Key, Event]) -> dict[Key, int]:
    """When each awaited collective is asked for: as the wait for it begins.

    Those that one wait was for follow each other a nanosecond apart, in the order in which they were asked for, since
    a collective and the wait for it are told from others by their moment.
    """
    collectives = [row for row in rows if row.kind == Kind.COLLECTIVE]
    others_ns = {row.enqueue_ns for row in collectives if _key(row) not in awaited}
    found: dict[Key, int] = {}
    last_ns = -1
    for at_ns, _, key in sorted(
        (max(awaited[key].start_ns, row.enqueue_ns), row.enqueue_ns, key)
        for row in collectives
        if (key := _key(row)) in awaited
    ):
        last_ns = max(at_ns, last_ns + 1)
        while last_ns in others_ns:
            last_ns += 1
        found[key] = last_ns
    return found


def _of_collective(
    row: Event, is_bucket: bool, awaited: dict[Key, Event], asked_ns: dict[Key, int]
) -> list[Event]:
    """The collective as replay reads it, and the wait for it where there is one of its own."""
    if is_bucket:
        return [row]
    row = row._replace(bucket=-1)
    begins_ns = asked_ns.get(_key(row))
    if begins_ns is None:
        return [row]
    waits = _span(Kind.WAIT, row.step, begins_ns, max(begins_ns, awaited[_key(row)].end_ns), name=row.name)
    return [row._replace(enqueue_ns=begins_ns), waits]


def _passes(step: int, rows: Sequence[Event], buckets: Sequence[Event]) -> list[Event]:
    """Backward computes until the wait for its last bucket begins, and lasts until that ends."""
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
    """Forward until backward begins, and backward until its last share ends, where no gradients are reduced."""
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
