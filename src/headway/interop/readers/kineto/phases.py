"""Which part of a step the host is in: by the operators and annotations that PyTorch itself records."""

from __future__ import annotations

import numpy as np

from headway import intervals
from headway.arrays import Indices, Texts
from headway.interop.readers.kineto.document import OPERATIONS, KinetoDocument
from headway.trace.events import Kind

BACKWARD = "autograd::engine::evaluate_function"
OPTIMIZER = "Optimizer.step"
INPUT = "enumerate(DataLoader)"


def named(document: KinetoDocument, prefix: str) -> Indices:
    """The operators and annotations whose names begin with ``prefix``."""
    operations = document.of_category(*OPERATIONS)
    return operations[document.called(operations, lambda name: name.startswith(prefix))]


def of_moments(document: KinetoDocument, launches: Indices) -> Texts:
    """FORWARD, BACKWARD or OPTIMIZER for each launch, by what encloses it on its thread; -1 is FORWARD."""
    found = np.full(len(launches), Kind.FORWARD, dtype=object)
    known = launches >= 0
    threads = document.threads(launches)
    starts_ns = document.start_ns[launches]
    for kind, spans in (
        (Kind.BACKWARD, named(document, BACKWARD)),
        (Kind.OPTIMIZER, named(document, OPTIMIZER)),
    ):
        span_threads = document.threads(spans)
        for thread in np.unique(span_threads).tolist():
            own = spans[span_threads == thread]
            covered = intervals.union(document.start_ns[own], document.end_ns[own])
            found[known & (threads == thread) & intervals.inside(covered, starts_ns)] = kind
    return found


def input_spans(document: KinetoDocument) -> intervals.Spans:
    """When the loop waited for its data loader."""
    reading = named(document, INPUT)
    return intervals.union(document.start_ns[reading], document.end_ns[reading])
