"""TensorFlow's operations on threads of the host: which step asked for each, and what it was."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from headway import intervals
from headway.arrays import Ints
from headway.ext import Kind, texts
from headway.intervals import Spans
from headway_readers.xplane.assemble import LONGEST_NAME, STEPS_APART, Collectives, Work
from headway_readers.xplane.names import CALLS, INPUT, collective_of, phase_of, scope_of, split
from headway_readers.xplane.nesting import enclosing
from headway_readers.xplane.profile import Profile
from headway_readers.xplane.steps import Marks

LARGEST_INSTANCE = 2**60
_NEVER = 2**62
_MOST_ASKS = 1000  # of one operation in one run
_EXECUTOR = "ExecutorState::Process"
_READS = "IteratorGetNextOp::DoCompute"
_ASKS = "ExecutorState::ProcessAsync::Start"
_ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8,
    "bool": 1, "complex64": 8,
}  # fmt: skip
_SHAPE = re.compile(r"^\(?([a-z]+\d*)\[([\d,]{0,200})\]")


class Operations:
    """The operations of a profile, and the steps that asked for them."""

    def __init__(self, profile: Profile, marks: Marks | None) -> None:
        self._profile = profile
        self._marks = marks
        parts = [split(text) for text in profile.strings]
        self._place = [place for place, _ in parts]
        self._input = np.array([kind in INPUT for _, kind in parts], dtype=bool)
        self._no_work = self._input | np.array([kind in CALLS for _, kind in parts], dtype=bool)
        self._collective = texts([collective_of(kind) for _, kind in parts])
        self._runs = self._runs_of_steps()
        typed = np.array([bool(kind) for _, kind in parts], dtype=bool)
        self.row = np.flatnonzero(typed[profile.name]) if len(typed) else np.zeros(0, dtype=np.int64)
        self.step = self._steps_of(self.row)

    def _runs_of_steps(self) -> dict[int, int]:
        """The step that asked for each run of a function, by the run's number."""
        profile, marks = self._profile, self._marks
        if marks is None:
            return {}
        number, known = profile.value("id")
        runs = profile.named("FunctionRun") & known
        here = np.flatnonzero(runs & profile.on([marks.line]))
        here = here if len(here) else np.flatnonzero(runs)
        steps = marks.steps.of(profile.start_ns[here])
        return dict(zip(number[here].tolist(), steps.tolist(), strict=True))

    def _steps_of(self, rows: Ints) -> Ints:
        """The step of each operation: by the run that it is part of, or by its time on the thread of the steps.

        What is part of no known run reads input ahead, or belongs to something else.
        """
        profile, marks = self._profile, self._marks
        if marks is None:
            return np.zeros(len(rows), dtype=np.int64)
        executors = np.flatnonzero(profile.named(_EXECUTOR) & profile.value("id")[1])
        around = enclosing(profile, executors, rows)
        run, told = profile.value("step_id")
        inside = np.where(
            around >= 0, profile.value("id")[0][executors[around]] if len(executors) else 0, run[rows]
        )
        of_run = (around >= 0) | told[rows]
        by_run = np.array([self._runs.get(number, -1) for number in inside.tolist()], dtype=np.int64)
        by_time = np.where(profile.line[rows] == marks.line, marks.steps.of(profile.start_ns[rows]), -1)
        if not self._runs:
            by_run = marks.steps.of(profile.start_ns[rows])
        return np.where(of_run, by_run, by_time)

    def work(self) -> Work:
        """What was computed."""
        profile = self._profile
        name = profile.name[self.row]
        keep = (self._collective[name] == "") & ~self._no_work[name] & (self.step >= 0)
        rows, names = self.row[keep], name[keep]
        unique, inverse = np.unique(names, return_inverse=True)
        phase = texts([phase_of(profile.strings[one]) or Kind.FORWARD for one in unique.tolist()])
        scope = texts([scope_of(profile.strings[one])[:200] for one in unique.tolist()])
        return Work(
            kind=phase[inverse],
            name=scope[inverse],
            step=self.step[keep],
            start_ns=profile.start_ns[rows],
            end_ns=profile.end_ns[rows],
        )

    def collectives(self) -> tuple[Collectives, int]:
        """What was communicated, and how many replicas of this process took part in each."""
        profile = self._profile
        name = self._collective[profile.name[self.row]]
        rows, step = self.row[name != ""], self.step[name != ""]
        group, grouped = (column[rows] for column in profile.value("group_key"))
        instance, numbered = (column[rows] for column in profile.value("instance_key"))
        keys = [str(key) if told else "" for key, told in zip(group.tolist(), grouped.tolist(), strict=True)]
        written = [profile.strings[one][:LONGEST_NAME] for one in profile.name[rows].tolist()]
        return _joined(
            Collectives(
                name=name[name != ""],
                group=texts(keys),
                sequence=np.where(numbered & (instance >= 0) & (instance < LARGEST_INSTANCE), instance, -1),
                size_bytes=self._sizes(rows),
                step=step,
                enqueue_ns=self._asked(rows),
                start_ns=profile.start_ns[rows],
                end_ns=profile.end_ns[rows],
                algorithm=texts(written),
            ),
            self._marks,
        )

    def _asked(self, rows: Ints) -> Ints:
        """When the executor came to each of ``rows``, which may have waited for a thread from then on."""
        profile = self._profile
        named, known = profile.value("name")
        run, told = profile.value("step_id")
        asks: dict[tuple[int, str], list[int]] = {}
        for event in np.flatnonzero(profile.named(_ASKS) & known & told).tolist():
            key = int(run[event]), profile.strings[int(named[event])]
            asks.setdefault(key, []).append(int(profile.start_ns[event]))
        found = []
        for event, start_ns, known_run in zip(
            rows.tolist(), profile.start_ns[rows].tolist(), told[rows].tolist(), strict=True
        ):
            key = int(run[event]), self._place[int(profile.name[event])]
            asked = asks.get(key, [])[:_MOST_ASKS] if known_run else []
            found.append(max((moment for moment in asked if moment <= start_ns), default=start_ns))
        return np.array(found, dtype=np.int64)

    def _sizes(self, rows: Ints) -> Ints:
        """How much each of ``rows`` carries, where its shape is told: "(float[1290];int32[])"."""
        shape, known = self._profile.value("shape")
        told = [
            self._profile.strings[one] if is_told else ""
            for one, is_told in zip(shape[rows].tolist(), known[rows].tolist(), strict=True)
        ]
        return np.array([_bytes_of(one) for one in told], dtype=np.int64)

    def reading(self) -> Spans:
        """When an executor waited for the iterator to give the next element."""
        profile = self._profile
        direct = self.row[self._input[profile.name[self.row]] & (self.step >= 0)]
        number, known = profile.value("id")
        reads = np.flatnonzero(profile.named(_READS) & known)
        if self._marks is not None:
            reads = reads[[self._runs.get(run, -1) >= 0 for run in number[reads].tolist()]]
        kind, typed = profile.value("kernel_type")
        run, told = profile.value("step_id")
        asked: dict[int, int] = {}
        for event in np.flatnonzero(profile.named(_ASKS) & typed & told).tolist():
            if profile.strings[int(kind[event])] in INPUT:
                asked.setdefault(int(run[event]), int(profile.start_ns[event]))
        ends = profile.end_ns[reads]
        starts = np.array([asked.get(run, _NEVER) for run in number[reads].tolist()], dtype=np.int64)
        starts = np.minimum(starts, profile.start_ns[reads])
        return intervals.join(
            intervals.union(starts, ends), intervals.union(profile.start_ns[direct], profile.end_ns[direct])
        )


def _bytes_of(shape: str) -> int:
    found = _SHAPE.match(shape)
    item_bytes = _ITEM_BYTES.get(found[1]) if found else None
    if found is None or item_bytes is None:
        return -1
    size = math.prod(int(one) for one in found[2].split(",") if one) * item_bytes
    return size if size < 2**62 else -1


def _joined(found: Collectives, marks: Marks | None) -> tuple[Collectives, int]:
    """Replicas of one process as one member; and instances' numbers that repeat in each step as such that do not."""
    order = np.lexsort((found.start_ns, found.step, found.sequence, found.group.astype(str)))
    found = found.where(order)
    same = np.zeros(len(found), dtype=bool)
    if len(found) > 1:
        same[1:] = (found.sequence[1:] == found.sequence[:-1]) & (found.step[1:] == found.step[:-1])
        same[1:] &= (found.group[1:] == found.group[:-1]) & (found.sequence[1:] >= 0)
    first = np.flatnonzero(~same)
    if not len(first):
        return found, 1
    ends, asked = np.maximum.reduceat(found.end_ns, first), np.minimum.reduceat(found.enqueue_ns, first)
    replicas = int(np.diff(first, append=len(found)).max())
    found = replace(found.where(first), enqueue_ns=asked)
    found = replace(found, end_ns=ends)
    again = (found.sequence[1:] == found.sequence[:-1]) & (found.group[1:] == found.group[:-1])
    if marks is not None and (again & (found.sequence[1:] >= 0)).any():
        number = marks.steps.number[np.maximum(found.step, 0)]
        within = number * STEPS_APART + found.sequence % STEPS_APART
        found = replace(found, sequence=np.where(found.sequence >= 0, within, -1))
    return found, replicas
