"""Traces without sense or order, for what must hold of any trace."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.synthetic import SyntheticJob, trace_of

from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

END_NS = 3_000_000
COMPUTE = (
    Kind.INPUT, Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.WAIT, Kind.OPTIMIZER,
    Kind.UPDATE, Kind.GRADIENT_READY,
)  # fmt: skip


@st.composite
def _compute_events(draw: st.DrawFn) -> Event:
    start = draw(st.integers(0, END_NS))
    length = draw(st.integers(0, END_NS // 4))
    name = draw(st.sampled_from(["", "a", "b"]))
    return Event(
        draw(st.sampled_from(COMPUTE)),
        name,
        Stream.COMPUTE,
        0,
        start,
        length,
        bucket=draw(st.integers(-1, 2)),
    )


@st.composite
def _communication_events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from([Kind.COLLECTIVE, Kind.COLLECTIVE, Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE]))
    start = draw(st.integers(0, END_NS))
    return Event(
        kind,
        draw(st.sampled_from(["all_reduce", "broadcast"])),
        Stream.COMMUNICATION,
        draw(st.integers(0, 3)),
        start,
        draw(st.integers(0, END_NS // 4)),
        enqueue_ns=draw(st.integers(-1, END_NS)),
        group=draw(st.sampled_from(["0", "1"])),
        sequence=draw(st.integers(-1, 4)),
        size_bytes=draw(st.integers(-1, 10**6)),
        bucket=draw(st.integers(-1, 2)),
        peer=draw(st.integers(-1, 3)),
    )


@st.composite
def any_traces(draw: st.DrawFn) -> Trace:
    """A trace whose events may overlap, contradict each other, lack counterparts and point nowhere."""
    steps = draw(st.integers(1, 3))
    rows: dict[int, list[Event]] = {}
    for rank in range(draw(st.integers(1, 3))):
        borders = sorted(draw(st.lists(st.integers(0, END_NS), min_size=steps + 1, max_size=steps + 1)))
        rows[rank] = [
            Event(Kind.STEP, "", Stream.COMPUTE, step, borders[step], borders[step + 1] - borders[step])
            for step in range(steps)
        ]
        rows[rank] += draw(st.lists(_compute_events(), max_size=15))
        rows[rank] += draw(st.lists(_communication_events(), max_size=8))
    return trace_of(rows)


jobs = st.builds(
    SyntheticJob,
    world_size=st.integers(1, 5),
    steps=st.integers(1, 4),
    input_ms=st.floats(0, 20),
    forward_ms=st.floats(0.1, 20),
    backward_ms=st.floats(0.1, 20),
    bucket_bytes=st.lists(st.integers(1, 10**7), max_size=5).map(tuple),
    blocking_loss=st.booleans(),
    jitter=st.floats(0, 1),
    seed=st.integers(0, 100),
    slow=st.dictionaries(
        st.tuples(st.integers(0, 4), st.sampled_from(["input", "forward", "backward", "optimizer", "rest"])),
        st.floats(0, 30),
        max_size=2,
    ),
)
"""Sensible jobs of every shape."""
