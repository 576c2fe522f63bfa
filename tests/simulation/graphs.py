"""Graphs for the engine's tests: drawn at random, with resources, queues and latencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from headway.simulation.building import WHOLE, OperationGraph, OperationGraphBuilder, Resources


@dataclass(frozen=True)
class DrawnOperation:
    """One operation, as ``OperationGraphBuilder.operation`` takes it; ``after`` are earlier ones."""

    duration_ns: int
    latency_ns: int
    sender: int
    receiver: int
    queue: int
    after: tuple[int, ...]
    asked: float = 1.0


RESOURCES = 5


@st.composite
def drawn_operations(draw: st.DrawFn, most: int = 40, least_asked: float = 1.0) -> list[DrawnOperation]:
    """Operations in an order in which each may wait for earlier ones only."""
    operations = []
    asked = st.just(1.0) | st.floats(least_asked, 1.0)
    for number in range(draw(st.integers(1, most))):
        sender, receiver = draw(st.integers(-1, RESOURCES - 1)), draw(st.integers(-1, RESOURCES - 1))
        operations.append(
            DrawnOperation(
                duration_ns=draw(st.integers(0, 30) | st.integers(0, 10**6)),
                latency_ns=draw(st.just(0) | st.integers(0, 20)),
                sender=sender,
                receiver=receiver,
                queue=draw(st.integers(0, 2)),
                after=tuple(draw(st.lists(st.integers(0, number - 1), max_size=3))) if number else (),
                asked=draw(asked),
            )
        )
    return operations


@st.composite
def drawn_resources(draw: st.DrawFn) -> Resources:
    """Some that are scarcer, some that save, and changes of how much there is of them."""
    room = draw(
        st.lists(st.just(WHOLE) | st.integers(WHOLE // 50, WHOLE), min_size=RESOURCES, max_size=RESOURCES)
    )
    burst_ns = draw(st.lists(st.just(0) | st.integers(1, 50), min_size=RESOURCES, max_size=RESOURCES))
    window_ns = draw(st.lists(st.just(0) | st.integers(1, 200), min_size=RESOURCES, max_size=RESOURCES))
    change = st.tuples(
        st.integers(0, 2000),
        st.integers(0, RESOURCES - 1),
        st.integers(WHOLE // 100, 2 * WHOLE),
        st.sampled_from([0.0, 0.5, 1.0]),
    )
    changes = [
        (time_ns, resource, left, int(left * spared))
        for time_ns, resource, left, spared in sorted(draw(st.lists(change, max_size=5)))
    ]
    return Resources(
        np.array(room, dtype=np.int64),
        np.array(burst_ns, dtype=np.int64),
        np.array(changes, dtype=np.int64).reshape(-1, 4),
        np.array(window_ns, dtype=np.int64),
    )


def graph_of(operations: list[DrawnOperation], resources: Resources | None = None) -> OperationGraph:
    builder = OperationGraphBuilder(resources or RESOURCES)
    for one in operations:
        builder.operation(
            one.duration_ns, after=one.after, latency_ns=one.latency_ns, sender=one.sender, receiver=one.receiver,
            queue=one.queue, demand=one.asked,
        )  # fmt: skip
    return builder.close()
