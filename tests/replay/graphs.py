"""Graphs for the engine's tests: drawn at random, with resources, queues and latencies."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from headway.graph.dataflow import Dataflow, DataflowBuilder


@dataclass(frozen=True)
class DrawnOperation:
    """One operation, as ``DataflowBuilder.operation`` takes it; ``after`` are earlier ones."""

    duration_ns: int
    latency_ns: int
    sender: int
    receiver: int
    queue: int
    after: tuple[int, ...]


RESOURCES = 5


@st.composite
def drawn_operations(draw: st.DrawFn, most: int = 40) -> list[DrawnOperation]:
    """Operations in an order in which each may wait for earlier ones only."""
    operations = []
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
            )
        )
    return operations


def graph_of(operations: list[DrawnOperation]) -> Dataflow:
    builder = DataflowBuilder(RESOURCES)
    for one in operations:
        builder.operation(
            one.duration_ns, after=one.after, latency_ns=one.latency_ns, sender=one.sender, receiver=one.receiver,
            queue=one.queue,
        )  # fmt: skip
    return builder.close()
