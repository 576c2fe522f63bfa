"""Traces without sense or order, for what must hold of any trace."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.synthetic import Connections, SyntheticJob, trace_of

from headway.model import ModelSpec, ParameterSpec
from headway.trace.events import Event, Kind, Stream
from headway.trace.format import Trace

END_NS = 3_000_000
COMPUTE = (
    Kind.INPUT, Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.WAIT, Kind.OPTIMIZER,
    Kind.UPDATE, Kind.GRADIENT_READY,
)  # fmt: skip
BESIDES = (Kind.PAUSE, Kind.IDLE)


@st.composite
def _compute_events(draw: st.DrawFn) -> Event:
    start = draw(st.integers(0, END_NS))
    length = draw(st.integers(0, END_NS // 4))
    name = draw(st.sampled_from(["", "a", "b"]))
    return Event(
        draw(st.sampled_from(COMPUTE + BESIDES)),
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
def _counts(draw: st.DrawFn) -> Event:
    return Event(
        draw(st.sampled_from([Kind.LINK, Kind.DELIVERY_RATE])),
        "",
        Stream.COMMUNICATION,
        draw(st.integers(0, 3)),
        draw(st.integers(0, END_NS)),
        draw(st.integers(0, 2 * END_NS)),
        size_bytes=draw(st.sampled_from([-1, 0, 65_536, 10**6, 10**9])),
        peer=draw(st.integers(-1, 3)),
    )


@st.composite
def any_traces(draw: st.DrawFn) -> Trace:
    """A trace whose events may overlap, contradict each other, lack counterparts and point nowhere."""
    steps = draw(st.sampled_from([1, 2, 3, 9]))
    rows: dict[int, list[Event]] = {}
    for rank in range(draw(st.integers(1, 3))):
        borders = sorted(draw(st.lists(st.integers(0, END_NS), min_size=steps + 1, max_size=steps + 1)))
        rows[rank] = [
            Event(Kind.STEP, "", Stream.COMPUTE, step, borders[step], borders[step + 1] - borders[step])
            for step in range(steps)
        ]
        rows[rank] += draw(st.lists(_compute_events(), max_size=15))
        rows[rank] += draw(st.lists(_communication_events(), max_size=8))
        rows[rank] += draw(st.lists(_counts(), max_size=8))
    weight = ParameterSpec(
        name="w", shape=(draw(st.sampled_from([0, 1, 100_000])),), dtype="float32", module=""
    )
    return trace_of(rows, model=ModelSpec(parameters=(weight,)))


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

healthy_jobs = st.builds(
    SyntheticJob,
    world_size=st.integers(1, 8),
    steps=st.integers(1, 25),
    ranks_a_host=st.sampled_from([1, 2, 4]),
    input_ms=st.floats(0, 2),
    forward_ms=st.floats(5, 30),
    backward_ms=st.floats(20, 60),
    optimizer_ms=st.floats(0.5, 4),
    rest_ms=st.floats(0, 3),
    bucket_bytes=st.integers(2, 6).map(lambda buckets: (1_000_000,) * buckets),
    gbps=st.floats(8, 20),
    connections=st.builds(
        Connections,
        held_up=st.dictionaries(st.sampled_from([(0, 1), (1, 0), (1, 2)]), st.floats(1, 30)),
        spread=st.floats(0, 0.4),
        counted=st.booleans(),
    ),
    blocking_loss=st.booleans(),
    jitter=st.floats(0, 0.12),
    seed=st.integers(0, 10_000),
)
"""Jobs with nothing wrong: some noise, communication that hides under backward, connections that look busy."""
