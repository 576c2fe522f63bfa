"""One MXNet profile as one worker's or one server's events.

A profile knows no keys, no sizes and no peers of what is pushed and pulled, only when. On a server it knows the sums
and updates, not what arrives from whom.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Ints
from headway.ext import (
    Companion,
    Document,
    Events,
    ForeignRank,
    Kind,
    Reading,
    Stream,
    damaged,
    rank_in_name,
    texts,
)
from headway.intervals import Spans as Cover
from headway_readers.mxnet.operators import COLLECTIVES, COMMUNICATION, is_any, work_of
from headway_readers.mxnet.profile import Profile, Spans, read_profile
from headway_readers.mxnet.steps import Steps, find_steps

_PROCESS = re.compile(rb'"name"\s*:\s*"(?:cpu/\d+|cpu pinned/\d*|cpu shared/\d*|MXNET_C_API|Device Storage)"')
_FOREIGN = (b"baseTimeNanoseconds", b"schemaVersion", b"highres-ticks")
_STEPS_APART = 1 << 20  # pushes or reductions of one step, at most
_KIND = {
    "forward": Kind.FORWARD, "backward": Kind.BACKWARD, "update": Kind.OPTIMIZER, "sum": Kind.OPERATOR,
    "keeping": Kind.OPERATOR,
}  # fmt: skip
_SERVER_KIND = {"sum": Kind.SUM, "update": Kind.OPTIMIZER}

NO_KEYS = (
    "The profile names neither key, size nor server of a push or pull. Those of one step are numbered in the order in "
    "which they ended, which is the same on all workers if one server holds all keys."
)
NO_NAMES = (
    "The profile gives neither names nor sizes of what Horovod reduces. A step's reductions are numbered in the order "
    "in which they ended, which is the same on all ranks."
)
TOGETHER = "Push and pull are one operation: it is shown as a push, with an empty pull at its end."
SERVER = "A server's profile contains neither keys, workers, network traffic nor steps."


def recognises(name: str, head: bytes) -> bool:
    """Whether a document that begins with ``head`` is a profile of MXNet: by the names of its devices."""
    return (
        b'"traceEvents"' in head
        and b'"process_name"' in head
        and _PROCESS.search(head) is not None
        and not any(word in head for word in _FOREIGN)
    )


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read one process's profile. Raises TraceError where it is damaged or holds no operator."""
    profile = read_profile(document)
    operators = profile.operators
    if not len(operators):
        raise damaged(
            document, "no operator", expected="an MXNet profile of imperative or symbolic operators"
        )
    work = work_of(operators.name)
    serving = _is_server(document.name, work)
    events, notes = _server(operators, work) if serving else _worker(profile, work)
    return Reading(
        ranks=[
            ForeignRank(
                source=document.name,
                framework="mxnet",
                events=events,
                rank=rank_in_name(document.name),
                role="server" if serving else "worker",
                backend="horovod" if is_any(work, "collective").any() else "kvstore",
                absolute=True,
                dropped_events=profile.dropped,
                notes=[*profile.notes, *notes],
            )
        ]
    )


def _is_server(name: str, work: npt.NDArray[np.object_]) -> bool:
    """A server neither communicates, as far as its profile shows, nor computes anything but sums and updates."""
    if is_any(work, *COMMUNICATION).any():
        return False
    serving = is_any(work, "sum", "update").any() and not is_any(work, "forward", "backward", "bulk").any()
    return bool(serving) or "server" in PurePath(name).name.lower()


def _server(operators: Spans, work: npt.NDArray[np.object_]) -> tuple[Events, list[str]]:
    kinds = texts([_SERVER_KIND.get(one, Kind.OPERATOR) for one in work.tolist()])
    return _computed(operators, kinds, np.full(len(operators), -1)), [SERVER]


def _worker(profile: Profile, work: npt.NDArray[np.object_]) -> tuple[Events, list[str]]:
    operators = profile.operators
    steps = find_steps(profile, work)
    number = steps.of(operators.start_ns)
    work = _unbulked(operators, work, number)
    communicating = is_any(work, *COMMUNICATION)
    computing = operators.where(~communicating)
    reading = profile.calls.named("MXDataIterNext")
    parts = [
        _step_events(steps),
        _computed(
            computing, texts([_KIND[one] for one in work[~communicating].tolist()]), number[~communicating]
        ),
        _computed(reading, texts([Kind.INPUT] * len(reading)), steps.of(reading.start_ns)),
        *_communicated(operators, work, number),
        _waits(
            "gradients" if is_any(work, "collective").any() else "parameters",
            operators.where(communicating),
            computing,
            steps,
        ),
    ]
    notes = [steps.note] if steps.note else []
    if is_any(work, "push", "pull", "push_pull").any():
        notes.append(NO_KEYS)
    if is_any(work, "push_pull").any():
        notes.append(TOGETHER)
    if is_any(work, "collective").any():
        notes.append(NO_NAMES)
    if not communicating.any():
        notes.append("No communication is recorded.")
    return Events.concatenated(parts), notes


def _unbulked(operators: Spans, work: npt.NDArray[np.object_], number: Ints) -> npt.NDArray[np.object_]:
    """Tell bulks of unnamed operators: backward where no forward operator of their step follows, else forward."""
    bulk = is_any(work, "bulk")
    forward = is_any(work, "forward") & (number >= 0)
    last_ns = np.full(int(number.max(initial=-1)) + 2, -1, dtype=np.int64)  # the last stands for no step
    np.maximum.at(last_ns, number[forward], operators.start_ns[forward])
    follows = (number >= 0) & (last_ns[number] >= 0) & (operators.start_ns > last_ns[number])
    return np.where(bulk, np.where(follows, "backward", "forward"), work)


def _step_events(steps: Steps) -> Events:
    numbers = np.arange(len(steps.start_ns))
    return Events.from_columns(
        kind=Kind.STEP,
        stream=Stream.COMPUTE,
        name=texts([f"step {number}" for number in numbers.tolist()]),
        step=numbers,
        start_ns=steps.start_ns,
        duration_ns=steps.end_ns - steps.start_ns,
    )


def _computed(spans: Spans, kinds: npt.NDArray[np.object_], number: Ints) -> Events:
    return Events.from_columns(
        kind=kinds, stream=Stream.COMPUTE, name=spans.name, step=number,
        start_ns=spans.start_ns, duration_ns=spans.end_ns - spans.start_ns,
    )  # fmt: skip


def _communicated(operators: Spans, work: npt.NDArray[np.object_], number: Ints) -> list[Events]:
    """Pushes, pulls and reductions, each numbered within its step in the order of their ends."""
    found = []
    for kinds, kind, group in (
        (("push", "push_pull"), Kind.PUSH, "kvstore"),
        (("pull", "push_pull"), Kind.PULL, "kvstore"),
        (("collective",), Kind.COLLECTIVE, "horovod"),
    ):
        picked = np.flatnonzero(is_any(work, *kinds))
        own, step = operators.where(picked), number[picked]
        # Half of a push and pull: the push is all of it, as it ends when the parameter is there; the pull is its end.
        together = work[picked] == "push_pull"
        start_ns = np.where(together & (kind == Kind.PULL), own.end_ns, own.start_ns)
        name = texts([COLLECTIVES.get(name, name) for name in own.name.tolist()])
        sequence = _numbered(step, own.end_ns)
        found.append(
            Events.from_columns(
                kind=kind,
                stream=Stream.COMMUNICATION,
                name=name,
                step=step,
                start_ns=start_ns,
                duration_ns=own.end_ns - start_ns,
                enqueue_ns=start_ns,
                group=group,
                # Pulls alone are answered one by one, in another order on each worker.
                sequence=np.where(together | (kind != Kind.PULL), sequence, -1),
                bucket=np.where((name == "all_reduce") & (sequence >= 0), sequence % _STEPS_APART, -1),
                algorithm=texts(["push_pull" if one else "" for one in together.tolist()]),
            )
        )
    return found


def _numbered(step: Ints, end_ns: Ints) -> Ints:
    """Numbers by order of ends (as written, where they are equal), from 0 in each step; -1 outside of steps."""
    order = np.lexsort((np.arange(len(step)), end_ns, step))
    ordered = step[order]
    begins = np.searchsorted(ordered, ordered)
    numbers = np.empty(len(step), dtype=np.int64)
    numbers[order] = ordered * _STEPS_APART + np.arange(len(step)) - begins
    return np.where(step >= 0, numbers, -1)


def _waits(name: str, communicating: Spans, computing: Spans, steps: Steps) -> Events:
    """When no operator ran while something was pushed, pulled or reduced, cut where steps begin or end."""
    exposed = intervals.subtract(
        intervals.union(communicating.start_ns, communicating.end_ns),
        intervals.union(computing.start_ns, computing.end_ns),
    )
    exposed = _cut(exposed, np.unique(np.concatenate([steps.start_ns, steps.end_ns])))
    number = steps.of(exposed[:, 0])
    exposed, number = exposed[number >= 0], number[number >= 0]
    return Events.from_columns(
        kind=Kind.WAIT,
        stream=Stream.COMPUTE,
        name=name,
        step=number,
        start_ns=exposed[:, 0],
        duration_ns=exposed[:, 1] - exposed[:, 0],
    )


def _cut(spans: Cover, times: Ints) -> Cover:
    """The same time in spans of which none reaches across one of ``times``."""
    index = np.searchsorted(spans[:, 0], times, side="left") - 1
    within = (index >= 0) & (times < spans[index, 1]) if len(spans) else np.zeros(len(times), dtype=bool)
    cuts = times[within]
    return np.column_stack(
        [np.sort(np.concatenate([spans[:, 0], cuts])), np.sort(np.concatenate([spans[:, 1], cuts]))]
    )
