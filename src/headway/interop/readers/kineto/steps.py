"""Finds the steps of a Kineto document, and its forward, backward and optimizer phases."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway import intervals
from headway.arrays import Indices, Ints, Texts
from headway.interop.readers.kineto.document import OPERATIONS, KinetoDocument
from headway.trace.events import Events, Kind, Stream

_STEP = re.compile(r"^ProfilerStep\s?#\s?(\d{1,15})$")
_MARKS = ("user_annotation", "cpu_op", "Operator")


@dataclass(frozen=True, eq=False)
class Steps:
    """Step windows on the main thread, in order. ``stated`` is False if the document marks none."""

    number: Ints
    start_ns: Ints
    end_ns: Ints
    main_thread: int
    stated: bool

    def of(self, moments: Ints) -> npt.NDArray[np.intp]:
        """The index of the last step that began before each moment; -1 if there is none."""
        steps: npt.NDArray[np.intp] = np.searchsorted(self.start_ns, moments, side="right") - 1
        return steps

    def rows(self, indices: Ints, start_ns: Ints, end_ns: Ints) -> Events:
        """STEP events for these steps."""
        numbers = self.number[indices]
        names = np.array([f"step {number}" for number in numbers.tolist()], dtype=object)
        return Events.from_columns(
            kind=Kind.STEP, stream=Stream.COMPUTE, name=names, step=numbers,
            start_ns=start_ns, duration_ns=end_ns - start_ns,
        )  # fmt: skip


def steps_of(document: KinetoDocument) -> Steps:
    """The steps marked by ``profiler.step()``, or else one step of everything."""
    marks = document.of_category(*_MARKS)
    marked = [
        (int(match[1]), index)
        for index, name in zip(marks.tolist(), document.name[marks].tolist(), strict=True)
        if name.startswith("ProfilerStep") and (match := _STEP.match(name))
    ]
    if not marked:
        first, last = document.start_ns[:1], document.end_ns.max(keepdims=True)
        return Steps(np.zeros(1, dtype=np.int64), first, last, _busiest(document), stated=False)
    once = dict(reversed(marked))  # the first mark of a repeated step counts
    picked = np.array(sorted(once.values()), dtype=np.intp)
    number_of = {index: number for number, index in once.items()}
    return Steps(
        number=np.array([number_of[index] for index in picked.tolist()], dtype=np.int64),
        start_ns=document.start_ns[picked],
        end_ns=document.end_ns[picked],
        main_thread=int(document.threads(picked[:1])[0]),
        stated=True,
    )


def _busiest(document: KinetoDocument) -> int:
    """The thread with the most operators."""
    operators = document.of_category("cpu_op", "Operator")
    threads, counts = np.unique(document.threads(operators), return_counts=True)
    return int(threads[np.argmax(counts)]) if len(threads) else -1


BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer.step"
INPUT = "enumerate(DataLoader)"


def named(document: KinetoDocument, prefix: str) -> Indices:
    """The operators and annotations whose names begin with ``prefix``."""
    operations = document.of_category(*OPERATIONS)
    return operations[document.called(operations, lambda name: name.startswith(prefix))]


def of_moments(document: KinetoDocument, launches: Indices) -> Texts:
    """FORWARD, BACKWARD or OPTIMIZER for each launch, by its enclosing spans; launch -1 gives FORWARD."""
    phases = np.full(len(launches), Kind.FORWARD, dtype=object)
    is_launched = launches >= 0
    threads = document.threads(launches)
    starts_ns = document.start_ns[launches]
    for kind, spans in (
        (Kind.BACKWARD, named(document, BACKWARD)),
        (Kind.OPTIMIZER, named(document, OPTIMIZER)),
    ):
        span_threads = document.threads(spans)
        for thread in np.unique(span_threads).tolist():
            thread_spans = spans[span_threads == thread]
            covered = intervals.union(document.start_ns[thread_spans], document.end_ns[thread_spans])
            phases[is_launched & (threads == thread) & intervals.inside(covered, starts_ns)] = kind
    return phases


def input_spans(document: KinetoDocument) -> intervals.Spans:
    """When the loop waited for its data loader."""
    reading = named(document, INPUT)
    return intervals.union(document.start_ns[reading], document.end_ns[reading])
