"""The events of one rank, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from headway.arrays import Flags, Indices, Ints, Texts


def texts(values: Sequence[Any]) -> Texts:
    """A column of strings (dtype object); other values, such as None, are kept."""
    # Slice assignment would check whether each value is a sequence.
    return np.fromiter(values, dtype=object, count=len(values))


class Kind:
    """The kinds of events. Each is a span on one stream of one rank unless noted otherwise."""

    STEP = "step"  # from the end of one optimizer step to the end of the next
    INPUT = "input"  # waiting for the data loader
    FORWARD_PASS = "forward_pass"  # the whole forward of the wrapped model
    FORWARD = "forward"  # one module's forward; a module inside another lies inside its span
    BACKWARD_PASS = "backward_pass"  # the whole backward, until the call of backward() returns
    BACKWARD = "backward"  # one module's share of the backward; shares do not overlap
    GRADIENT_READY = "gradient_ready"  # an instant: a parameter's gradient is complete on this rank
    WAIT = "wait"  # computation waits for communication
    PAUSE = "pause"  # the program does something else: a garbage collection, a checkpoint
    IDLE = "idle"  # a device has nothing to do; name says what its host was in
    # gradients are clipped, unscaled or read, or parameters are read; algorithm: SHARDED, or ""
    READ = "read"
    # an instant: the read that begins here is of the parameter ``name``, or of all if empty
    GRADIENT_READ = "gradient_read"
    OPTIMIZER = "optimizer"  # the optimizer's step
    UPDATE = "update"  # a deferred update of one bucket
    COLLECTIVE = "collective"  # from its start on this rank to its end; enqueue_ns is when it was requested
    SEND = "send"
    RECEIVE = "receive"
    LINK = "link"  # what a connection to ``peer`` carried in a step; it was busy for duration_ns
    DELIVERY_RATE = (
        "delivery_rate"  # an instant: size_bytes a second arrive at ``peer``, as the kernel estimates
    )
    OPERATOR = "operator"  # one operator or kernel; lies inside the passes, where those are known
    PUSH = "push"  # a worker hands a gradient to a parameter server; name is the key
    SUM = "sum"  # on a server: the workers' gradients of one key are added up
    PULL = "pull"  # a worker fetches a parameter from a parameter server


class Idle:
    """Why a device is idle: the names of events of kind IDLE."""

    LAUNCHING = "launching"  # the host does not launch kernels fast enough
    SYNCHRONISING = "synchronising"  # the host waits for the device before it launches more


class Read:
    """The purposes of reads: the names of events of kind READ.

    Gradients are read between backward and step, parameters between a step and the next forward. If gradients are
    sharded, each rank does its share of the reads in BY_SHARES.
    """

    CLIP = "clip"  # by their total norm
    CLIP_VALUE = "clip_value"
    UNSCALE = "unscale"
    SCALE = "scale"  # by a norm that is known
    LOOK = "look"  # gradients, or their norm, are read by the script itself
    VALUES = "values"  # parameters are averaged, saved or logged
    BY_SHARES = (CLIP, UNSCALE)


WORK = "work"
"""The name of a WAIT of the script or its optimizer for a ``torch.distributed.Work``."""

GROUP = "group"
"""The name of a WAIT for a group of ranks that average their models (partial all-reduce)."""

SHARDED = "sharded"
"""The ``algorithm`` of a READ in which each rank read only its share of the gradients."""


class Stream:
    """The streams of a rank, which run concurrently."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Event(NamedTuple):
    """One event. Times are nanoseconds on rank 0's clock; -1 means that a field does not apply."""

    kind: str
    name: str
    stream: str
    step: int
    start_ns: int
    duration_ns: int
    enqueue_ns: int = -1  # communication: when the collective was requested
    group: str = ""  # communication: the process group's name
    sequence: int = -1  # communication: its index in its group, equal on all members
    size_bytes: int = -1
    bucket: int = -1  # the bucket of gradients that a collective carries
    peer: int = -1
    algorithm: str = ""
    stage: int = -1  # pipelines: the stage that computes, or that sends or receives
    micro_batch: int = -1  # pipelines: the micro-batch that it belongs to

    @property
    def end_ns(self) -> int:
        """When the event ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Events of one rank as columns of equal length, ordered by start.

    ``stage`` and ``micro_batch`` take no memory if they are -1 throughout.
    """

    kind: Texts
    name: Texts
    stream: Texts
    step: Ints
    start_ns: Ints
    duration_ns: Ints
    enqueue_ns: Ints
    group: Texts
    sequence: Ints
    size_bytes: Ints
    bucket: Ints
    peer: Ints
    algorithm: Texts
    stage: Ints
    micro_batch: Ints

    def __len__(self) -> int:
        return len(self.start_ns)

    def __iter__(self) -> Iterator[Event]:
        columns = (getattr(self, field).tolist() for field in Event._fields)
        return (Event(*row) for row in zip(*columns, strict=True))

    @property
    def end_ns(self) -> Ints:
        """When each event ended."""
        ends: Ints = self.start_ns + self.duration_ns
        return ends

    @property
    def whole_steps(self) -> set[int]:
        """The numbers of the steps that were recorded from their start to their end."""
        return set(np.unique(self.step[self.kind == Kind.STEP]).tolist())

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages whose forwards ran on this rank, in ascending order."""
        stages = self.stage[self.kind == Kind.FORWARD_PASS]
        return tuple(np.unique(stages[stages >= 0]).tolist())

    def where(self, mask: Flags) -> Events:
        """The events selected by ``mask`` (one bool per event)."""
        count = int(np.count_nonzero(mask))
        return Events(
            **{field.name: _picked(getattr(self, field.name), mask, count) for field in fields(self)}
        )

    def of_kind(self, *kinds: str) -> Events:
        """The events of these kinds."""
        mask = np.zeros(len(self), dtype=bool)
        for kind in kinds:
            mask |= self.kind == kind
        return self.where(mask)

    def of_step(self, step: int) -> Events:
        """The events of one step."""
        return self.where(self.step == step)

    @classmethod
    def from_rows(cls, rows: list[Event]) -> Events:
        """Build columns from rows. They are sorted by start; events that start together keep their order."""
        ordered = sorted(rows, key=lambda event: event.start_ns)
        columns: dict[str, Any] = {}
        for index, name in enumerate(Event._fields):
            values = [row[index] for row in ordered]
            column = np.array(values, dtype=object if name in TEXT_COLUMNS else np.int64)
            columns[name] = shared_if_constant(name, column)
        return cls(**columns)

    @classmethod
    def from_columns(
        cls, *, kind: Texts | str, stream: Texts | str, start_ns: Ints, **columns: Any
    ) -> Events:
        """Build events from columns, sorted by ``start_ns``. A scalar fills its whole column.

        Missing columns hold the defaults of ``Event``; ``name`` is empty, ``step`` and ``duration_ns`` are 0.
        """
        count = len(start_ns)
        order = np.argsort(start_ns, kind="stable")
        remaining = {"kind": kind, "stream": stream, "start_ns": start_ns, **columns}
        ordered: dict[str, Any] = {}
        for name in Event._fields:
            value = remaining.pop(name) if name in remaining else _DEFAULTS[name]
            if not isinstance(value, np.ndarray):
                kept = np.array(value, dtype=object if isinstance(value, str) else np.int64)
                value = np.broadcast_to(kept, (count,)) if name in OPTIONAL_COLUMNS else np.full(count, kept)
            assert value.shape == (count,)
            if not _is_shared(value):
                value = value[order].astype(object if name in TEXT_COLUMNS else np.int64, copy=False)
            ordered[name] = value
        assert not remaining, f"no such columns: {sorted(remaining)}"
        return cls(**ordered)

    @classmethod
    def concatenated(cls, parts: Sequence[Events]) -> Events:
        """The events of all ``parts``, ordered by start."""
        joined = {
            name: shared_if_constant(name, np.concatenate([getattr(part, name) for part in parts]))
            for name in Event._fields
        }
        return cls.from_columns(**joined)


TEXT_COLUMNS = ("kind", "name", "stream", "group", "algorithm")
OPTIONAL_COLUMNS = ("stage", "micro_batch")
"""Integer columns that rank files omit if they are -1 throughout."""
_DEFAULTS: dict[str, Any] = {"name": "", "step": 0, "duration_ns": 0, **Event._field_defaults}


def absent(count: int) -> Ints:
    """A read-only column of ``count`` times -1 that takes no memory."""
    return np.broadcast_to(np.int64(-1), (count,))


def is_absent(column: Ints) -> bool:
    """Whether a column is -1 throughout."""
    return bool((column[:1] == -1).all()) if _is_shared(column) else bool((column == -1).all())


def shared_if_constant(name: str, column: Any) -> Any:
    """``column``, or a column without memory if it is optional and -1 throughout."""
    return absent(len(column)) if name in OPTIONAL_COLUMNS and is_absent(column) else column


def _is_shared(column: Any) -> bool:
    """Whether all rows share one value in memory (a broadcast scalar)."""
    return bool(column.strides == (0,))


def _picked(column: Any, mask: Flags, count: int) -> Any:
    return np.broadcast_to(column[:1], (count,)) if _is_shared(column) and len(column) else column[mask]


def is_message(events: Events) -> Flags:
    """Which of one rank's events are sends and receives."""
    messages: Flags = np.isin(events.kind, [Kind.SEND, Kind.RECEIVE])
    return messages


def inner_messages(events: Events) -> Flags:
    """Which of one rank's events are messages inside a recorded collective of the same group, name and sequence."""
    inner = is_message(events) & (events.sequence >= 0)
    if inner.any():
        collectives = set(_keys(events, np.flatnonzero(events.kind == Kind.COLLECTIVE)))
        rows = np.flatnonzero(inner)
        inner[rows] = [key in collectives for key in _keys(events, rows)]
    return inner


def _keys(events: Events, rows: Indices) -> Iterator[tuple[str, str, int]]:
    columns = events.group[rows], events.name[rows], events.sequence[rows]
    return zip(*(column.tolist() for column in columns), strict=True)
