import zlib
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.chakra_files import (
    FIXTURES,
    fixture,
    made,
    node,
    put_together,
    taken_apart,
    varint,
)
from tests.interop.readers.damaging import damaged_bytes, refused

from headway.errors import TraceError
from headway.interop.readers.chakra import communication, reader
from headway.interop.readers.chakra.schema import NodeType
from headway.interop.readers.chakra.timing import lay_out
from headway.interop.readers.foreign import Document, ForeignRank
from headway.interop.readers.formats import SNIFFED_BYTES, readers
from headway.trace.events import Events, Kind, Stream

COMP, COLLECTIVE, SEND, RECEIVE = NodeType.COMP, NodeType.COLLECTIVE, NodeType.SEND, NodeType.RECEIVE
US = 1000
GLOO = fixture("gloo.1.et.gz")
TEXT = fixture("text.0.et")


def rank_of(data: bytes, *, name: str = "trace.et", lenient: bool = False, ending: str = "") -> ForeignRank:
    reading = reader.read(Document(name, data, ending, lenient))
    assert not reading.companions
    (rank,) = reading.ranks
    assert rank.framework == "chakra"
    assert len(rank.events.of_kind(Kind.STEP))
    assert (rank.events.duration_ns >= 0).all()
    return rank


def durations_us(events: Events, *kinds: str) -> list[int]:
    return [int(value) // US for value in events.of_kind(*kinds).duration_ns]


# Chakra's own files ------------------------------------------------------------------------------------------


def test_a_workload_in_text_becomes_steps_of_layers() -> None:
    rank = rank_of(TEXT, name="run/text.0.et")
    events = rank.events
    assert rank.rank == 0
    assert rank_of(fixture("text.1.et"), name="run/text.1.et").rank == 1
    steps = events.of_kind(Kind.STEP)
    assert steps.step.tolist() == [0, 1, 2]
    assert (steps.duration_ns // US).tolist() == [3450] * 3  # communication takes no time here
    first = events.of_step(0)
    assert first.of_kind(Kind.FORWARD).name.tolist() == ["stem", "body", "head"]
    assert durations_us(first, Kind.FORWARD) == [500, 900, 200]
    assert first.of_kind(Kind.BACKWARD).name.tolist() == ["head", "head", "body", "body", "stem"]
    assert durations_us(first, Kind.BACKWARD) == [100, 150, 650, 700, 250]
    sums = first.of_kind(Kind.COLLECTIVE)
    assert sums.name.tolist() == ["all_reduce"] * 3
    assert sums.size_bytes.tolist() == [1_200_000, 4_000_000, 40_000]
    assert (sums.enqueue_ns // US).tolist() == [1700, 2500, 3450]  # when the weights' gradients were there
    assert any("repeats 3 times" in note for note in rank.notes)
    assert any("9 of 9 communication nodes have no duration" in note for note in rank.notes)


def test_the_members_of_a_collective_agree_on_its_sequence() -> None:
    first, second = (rank_of(fixture(f"text.{rank}.et")).events.of_kind(Kind.COLLECTIVE) for rank in range(2))
    assert first.sequence.tolist() == second.sequence.tolist() == list(range(9))
    assert first.size_bytes.tolist() == second.size_bytes.tolist()


def test_a_converted_pytorch_trace_over_gloo_is_understood() -> None:
    rank = rank_of(GLOO, name="gloo.1.et.gz")
    events = rank.events
    assert (rank.rank, rank.world_size, rank.version) == (1, 2, "1.1.1-chakra.0.0.4")
    assert rank.groups == {"0": (0, 1), "1": (0, 1), "2": (1,)}
    assert events.of_kind(Kind.STEP).step.tolist() == [1, 2]
    communication = events.of_step(2).of_kind(Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE)
    assert set(communication.stream.tolist()) == {Stream.COMMUNICATION}
    assert list(zip(communication.name.tolist(), communication.size_bytes.tolist(), strict=True)) == [
        ("all_reduce", 18720), ("all_reduce", 4000), ("all_reduce", 4000), ("broadcast", 40), ("all_gather", 800),
        ("reduce_scatter", 880), ("all_to_all", 256), ("all_gather", 240), ("reduce", 132), ("barrier", 0),
        ("gather", -1), ("scatter", -1), ("receive", 308), ("all_reduce", 84),
    ]  # fmt: skip
    assert communication.of_kind(Kind.RECEIVE).peer.tolist() == [0]
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT):
        assert len(events.of_kind(kind)), kind


def test_no_time_is_lost_where_nodes_state_none() -> None:
    _, nodes = taken_apart(GLOO)
    events = rank_of(GLOO).events
    taken = events.where(events.kind != Kind.STEP)
    taken = taken.where(taken.kind != Kind.WAIT)
    assert taken.duration_ns.sum() == sum(one.duration_micros for one in nodes) * US
    computing = taken.where(taken.stream == Stream.COMPUTE)
    assert (computing.start_ns[1:] >= computing.end_ns[:-1]).all()  # the host does one thing at a time


def test_files_without_any_time_are_refused_by_name() -> None:
    for name in ("metadata.0.et", "allreduce.0.et", "send.0.et"):
        with pytest.raises(TraceError, match=f"{name} contains no durations"):
            rank_of(fixture(name), name=name)


def test_computation_of_no_known_part_is_operators_of_one_step() -> None:
    rank = rank_of(fixture("dependent.0.et"))
    assert durations_us(rank.events, Kind.OPERATOR) == [5, 5]
    assert (rank.events.of_kind(Kind.OPERATOR).start_ns // US).tolist() == [0, 5]
    assert durations_us(rank.events, Kind.STEP) == [10]
    assert "No communication is recorded." in rank.notes
    assert any("one step" in note for note in rank.notes)


def test_it_is_recognised_and_others_are_not() -> None:
    for path in FIXTURES.glob("*.et*"):
        data = fixture(path.name)[:SNIFFED_BYTES]
        assert reader.recognises("any", data), path
        assert reader.recognises("any", data[: max(len(data) // 2, 70)]), path
    for path in FIXTURES.parent.rglob("*"):
        if path.is_file() and FIXTURES not in path.parents and path.suffix != ".py":
            data = path.read_bytes()
            packed = data[:2] == b"\x1f\x8b"
            head = zlib.decompressobj(31).decompress(data, SNIFFED_BYTES) if packed else data[:SNIFFED_BYTES]
            assert not reader.recognises(path.name, head), path
    assert reader.recognises("broken.0.et", b"\xff\xff")
    assert not reader.recognises("text.0.et", b'{"nodes": []}')
    assert not reader.recognises("any", b"")
    assert readers()["chakra"].recognises("any", TEXT)


# What nodes say ----------------------------------------------------------------------------------------------


def test_times_that_are_stated_are_kept() -> None:
    data = made(
        node(1, COMP, 300, name="fwd", start_us=1_000),
        node(2, COLLECTIVE, 500, start_us=1_450, needs=[1], comm_type=0, comm_size=64, pg_name="3"),
        node(3, COMP, 100, name="bwd", start_us=1_300, needs=[1]),
        node(4, COMP, 10, name="optimizer", start_us=1_950, needs=[2, 3]),
    )
    rank = rank_of(data)
    assert not any("states when" in note for note in rank.notes)
    (collective,) = list(rank.events.of_kind(Kind.COLLECTIVE))
    assert (collective.start_ns, collective.duration_ns) == (1_450 * US, 500 * US)
    assert collective.enqueue_ns == 1_300 * US  # it needed the forward only
    assert (collective.group, collective.size_bytes, collective.sequence) == ("3", 64, 0)
    (wait,) = list(rank.events.of_kind(Kind.WAIT))
    assert (wait.start_ns, wait.end_ns, wait.name) == (1_400 * US, 1_950 * US, "all_reduce")
    assert [event.kind for event in rank.events][1:] == [
        "forward",
        "backward",
        "wait",
        "collective",
        "optimizer",
    ]


def test_messages_have_their_other_end() -> None:
    data = made(
        node(1, SEND, 20, comm_src=0, comm_dst=7, comm_tag=1, comm_size=512),
        node(2, RECEIVE, 30, needs=[1], comm_src=5, comm_dst=0, tensor_size=256),
    )
    events = rank_of(data).events
    (send,), (receive,) = list(events.of_kind(Kind.SEND)), list(events.of_kind(Kind.RECEIVE))
    assert (send.name, send.peer, send.size_bytes, send.duration_ns) == ("send", 7, 512, 20 * US)
    assert (receive.name, receive.peer, receive.size_bytes, receive.start_ns) == ("receive", 5, 256, 20 * US)


def test_what_each_rank_gives_becomes_the_whole_where_the_number_of_ranks_is_known() -> None:
    gathered = node(1, COLLECTIVE, 9, comm_type=2, comm_size=100)
    known = rank_of(made(gathered, world_size=8))
    assert known.events.of_kind(Kind.COLLECTIVE).size_bytes.tolist() == [800]
    unknown = rank_of(made(gathered))
    assert unknown.events.of_kind(Kind.COLLECTIVE).size_bytes.tolist() == [-1]
    assert any("size of their group is unknown" in note for note in unknown.notes)


def test_communication_waits_for_its_turn_in_its_group_only() -> None:
    data = made(
        node(1, COMP, 10),
        *(node(number, COLLECTIVE, 100, needs=[1], comm_type=0, comm_size=4, pg_name=group)
          for number, group in ((2, "a"), (3, "a"), (4, "b"))),
    )  # fmt: skip
    found = rank_of(data).events.of_kind(Kind.COLLECTIVE)
    at = dict(
        zip(
            zip(found.group.tolist(), found.sequence.tolist(), strict=True), found.start_ns // US, strict=True
        )
    )
    assert at == {("a", 0): 10, ("a", 1): 110, ("b", 0): 10}
    assert (found.enqueue_ns // US).tolist() == [10, 10, 10]


def test_steps_of_a_device_begin_with_its_first_computation() -> None:
    nodes = []
    for step, base, before in ((4, 0, []), (5, 10, [4])):
        nodes += [
            node(base + 1, COMP, 0, name=f"ProfilerStep#{step}", needs=before, is_cpu_op=True, rf_id=1),
            node(base + 2, COMP, 10, name="aten::mm", needs=[base + 1], callers=[base + 1], is_cpu_op=True, rf_id=2),
            node(base + 3, COMP, 70, name="gemm", needs=[base + 2], callers=[base + 2], is_cpu_op=False, stream=7),
            node(base + 4, COMP, 5, name="MulBackward0", needs=[base + 2], callers=[base + 1], is_cpu_op=True),
            node(base + 5, COMP, 40, name="gemm", needs=[base + 4], callers=[base + 4], is_cpu_op=False, stream=7),
            node(base + 6, COLLECTIVE, 50, needs=[base + 4], is_cpu_op=False, stream=9, comm_type=0, comm_size=4),
        ]  # fmt: skip
    events = rank_of(made(*nodes)).events
    steps = events.of_kind(Kind.STEP)
    assert steps.step.tolist() == [4, 5]
    assert (steps.start_ns // US).tolist() == [10, 120]
    assert events.of_kind(Kind.FORWARD).step.tolist() == [4, 5]
    assert events.of_kind(Kind.BACKWARD).step.tolist() == [4, 5]
    assert durations_us(events, Kind.FORWARD) == [70, 70]
    assert durations_us(events, Kind.BACKWARD) == [40, 40]
    assert events.of_kind(Kind.COLLECTIVE).step.tolist() == [4, 5]
    assert set(events.name.tolist()).isdisjoint({"aten::mm", "MulBackward0"})


def test_callers_that_call_themselves_do_not_hold_anything_up() -> None:
    data = made(node(1, COMP, 5, callers=[1, 99]), node(2, COMP, 5, needs=[1]), node(3, COMP, 5, needs=[2]))
    assert durations_us(rank_of(data).events, Kind.OPERATOR) == [5, 5, 5]
    data = made(node(1, COMP, 5, callers=[2]), node(2, COMP, 5, callers=[1], needs=[1]))
    rank = rank_of(data)
    assert durations_us(rank.events, Kind.OPERATOR) == [5, 5]
    assert any("Control dependencies form a cycle" in note for note in rank.notes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("COMP_NODE_conv1_FWD", Kind.FORWARD), ("COMP_NODE_conv1_BWD_WG", Kind.BACKWARD), ("layer3.fwd", Kind.FORWARD),
        ("autograd::engine::evaluate_function: AddBackward0", Kind.BACKWARD),
        ("aten::threshold_backward", Kind.BACKWARD),
        ("Optimizer.step#SGD.step", Kind.OPTIMIZER), ("aten::_fused_adamw_", Kind.OPTIMIZER),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", Kind.INPUT), ("aten::mm", ""),
        ("DistributedDataParallel.forward", Kind.FORWARD), ("adaptive_pool", ""), ("option", ""), ("forwarding", ""),
    ],
)  # fmt: skip
def test_names_tell_the_part_of_a_step(name: str, kind: str) -> None:
    assert communication.of_name(name) == kind


# Layout ------------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(80), deadline=None)
def test_nothing_starts_before_what_it_needs_and_queues_serve_one_at_a_time(draw: st.DataObject) -> None:
    count = draw.draw(st.integers(1, 25))
    needs = [
        sorted(draw.draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else []
        for index in range(count)
    ]
    durations = draw.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    queues = draw.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=count, max_size=count))
    layout = lay_out(needs, durations, queues, list(range(count)))
    assert layout.stuck == 0
    end = layout.start_ns + np.array(durations)
    for index in range(count):
        assert layout.ready_ns[index] == max((end[need] for need in needs[index]), default=0)
        assert layout.start_ns[index] >= layout.ready_ns[index]
        if queues[index] is None:
            assert layout.start_ns[index] == layout.ready_ns[index]
    for queue in ("a", "b"):
        own = sorted(
            (layout.start_ns[i], end[i]) for i in range(count) if queues[i] == queue and durations[i]
        )
        assert all(before[1] <= after[0] for before, after in pairwise(own))


# Damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (made(node(1, COMP, 5, needs=[2]), node(2, COMP, 5, needs=[1])), "dependency cycle"),
        (made(node(1, COMP, 5, needs=[1])), "dependency cycle"),
        (made(node(1, COMP, 5), node(2, COMP, 5, needs=[77])), "a dependency on node 77"),
        (made(node(1, COMP, 5), node(1, COMP, 6)), "the id 1 twice"),
        (made(node(1, COMP, 2**63)), "a node of 9223372036854775808 us"),
        (made(node(1, COMP, 5, start_us=2**64 - 1)), "us at 18446744073709551615 us"),
        (TEXT[:-7], "a message of"),
        (TEXT + b"\xff" * 12, "a message of endless bytes"),
        (TEXT + varint(2**62) + b"abc", "a message of 4611686018427387904 bytes"),
        (TEXT + b"\x00", "a message of 0 bytes"),
        (TEXT + b"\x03abc", "is not a node"),
        (b"\x03\x0a\x01\xff" + TEXT, "is not metadata"),
        (b"", "no readable node"),
        (made(), "no readable node"),
    ],
)  # fmt: skip
def test_damage_is_named_and_leniently_what_is_whole_is_kept(data: bytes, what: str) -> None:
    with pytest.raises(TraceError, match=f"trace.et is damaged.*{what}"):
        rank_of(data)
    refused(partial(rank_of, data, lenient=True))


def test_leniently_what_is_whole_is_kept() -> None:
    cut = rank_of(TEXT[:-7], lenient=True)
    assert 30 < len(cut.events) < len(rank_of(TEXT).events)
    assert any("is damaged (a message of" in note for note in cut.notes)
    knot = made(node(1, COMP, 5), node(2, COMP, 5, needs=[3]), node(3, COMP, 5, needs=[2]))
    kept = rank_of(knot, lenient=True)
    assert (durations_us(kept.events, Kind.OPERATOR), kept.dropped_events) == ([5], 2)
    lost = rank_of(made(node(1, COMP, 5), node(2, COMP, 5, needs=[77])), lenient=True)
    assert durations_us(lost.events, Kind.OPERATOR) == [5, 5]


def test_what_is_wrong_with_the_end_is_said() -> None:
    with pytest.raises(TraceError, match="the compressed file is truncated"):
        rank_of(TEXT, ending="the compressed file is truncated")
    kept = rank_of(TEXT, ending="the compressed file is truncated", lenient=True)
    assert any("the compressed file is truncated" in note for note in kept.notes)


def test_times_that_outgrow_counting_are_refused() -> None:
    data = made(*(node(number, COMP, 2**61 // 1000, needs=range(1, number)) for number in range(1, 9)))
    for lenient in (False, True):
        with pytest.raises(TraceError, match="more than 146 years"):
            rank_of(data, lenient=lenient)


def check(data: bytes, name: str = "trace.et") -> None:
    reader.recognises(name, data[:SNIFFED_BYTES])
    for lenient in (False, True):
        assert len(refused(partial(rank_of, data, name=name, lenient=lenient)).splitlines()) <= 1


SMALL: Any = taken_apart(GLOO)
CALLS = [one for one in SMALL[1][40:] if one.name.startswith(("c10d", "gloo"))]
SMALL_GLOO = put_together(SMALL[0], [*SMALL[1][:40], *CALLS[:6]])


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damage_is_reported_and_nothing_else_escapes(draw: st.DataObject) -> None:
    data = draw.draw(st.sampled_from([TEXT, SMALL_GLOO, fixture("metadata.0.et")]))
    check(damaged_bytes(draw, data))


NUMBERS = st.integers(0, 6) | st.sampled_from([2**63, 2**64 - 1])
WHOLE = st.integers(-5, 12) | st.sampled_from([2**62, -(2**63), 2**63 - 1])
VALUES = WHOLE | st.booleans() | st.text(max_size=3) | st.sampled_from([float("nan"), float("inf"), -1e300])
NAMES = ["fwd", "ProfilerStep#1", "ProfilerStep#2", "gloo:all_reduce", "c10d::send", "\x1b[31m<b>"]
KEYS = [
    "comm_type", "comm_size", "comm_dst", "pg_name", "rf_id", "stream", "tid", "is_cpu_op", "tensor_size",
    "headway_kind",
    "headway_size", "headway_sequence", "headway_asked",
]  # fmt: skip
INPUTS = ["", "[", "[[1, 2, 0, 5, 4, 'cpu'], '<Object>', 1, 5]", "[" * 9999]
ABOUT = st.dictionaries(
    st.sampled_from(["rank", "world_size", "host", "clock", "headway"]), VALUES, max_size=3
)


@st.composite
def odd_nodes(draw: st.DrawFn) -> Any:
    one = node(
        draw(NUMBERS), draw(st.integers(-1, 9)), draw(NUMBERS), name=draw(st.sampled_from(NAMES)),
        start_us=draw(st.just(0) | NUMBERS), needs=draw(st.lists(NUMBERS, max_size=2)),
        callers=draw(st.lists(NUMBERS, max_size=2)),
        **draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)),
    )  # fmt: skip
    one.inputs.values = draw(st.sampled_from(INPUTS))
    return one


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(odd_nodes(), min_size=1, max_size=7), st.lists(WHOLE, max_size=6), ABOUT)
def test_odd_nodes_are_reported_and_nothing_else_escapes(
    nodes: list[Any], windows: list[int], about: dict[str, Any]
) -> None:
    check(made(*nodes, headway_steps=windows, **about))


def test_a_name_of_any_length_does_no_harm() -> None:
    data = made(
        *(node(number, COMP, 5, name=("x" * 300_000 if number == 1 else "y")) for number in range(1, 400))
    )
    assert max(map(len, rank_of(data).events.name.tolist())) <= 200
