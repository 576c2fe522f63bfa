"""Documents of ranks that compute on a device, made up here: no recording of ours is of one. See test_third_party."""

from __future__ import annotations

from typing import Any

import pytest
from tests.interop.readers.kineto_documents import BASE_NS, Entry, launched, read_document, span, step

from headway.trace.events import Event, Kind, Stream

SUM, KERNEL, BACKWARD = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "sgemm",
    "autograd::engine::evaluate_function: Mul",
)
OWN: Entry = {
    "Collective name": "_allreduce_base", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16",
    "Process Group Name": "7", "Process Group Description": "dp", "Process Group Ranks": "[0, 8]", "Seq": 41,
    "Group size": 2, "Rank": 0,
}  # fmt: skip


def rows(events: list[Entry], *kinds: str, **head: Any) -> list[Event]:
    """The events of some kinds, with times in microseconds since the document's base."""
    found = read_document(events, rank=0, **head).events.of_kind(*kinds)
    return [
        one._replace(start_ns=(one.start_ns - BASE_NS) // 1000, duration_ns=one.duration_ns // 1000)
        for one in found
    ]


def brief(events: list[Event]) -> list[tuple[str, int, int, int]]:
    return [(one.name, one.step, one.start_ns, one.start_ns + one.duration_ns) for one in events]


def test_a_kernel_belongs_to_where_it_was_launched() -> None:
    """Whenever it runs: the second runs when the host is in the next step, the third was asked for in backward."""
    events = [
        step(5, 0, 100), step(6, 100, 100), step(7, 200, 100),
        *launched("one", 10, 20, 50, 1), *launched("two", 90, 110, 30, 2), span("cpu_op", BACKWARD, 120, 20),
        *launched("three", 125, 150, 20, 3), span("cpu_op", BACKWARD, 150, 30, tid=2),
        *launched("four", 155, 180, 5, 4, tid=2),
        *launched("five", 156, 186, 4, 5), span("user_annotation", "Optimizer.step#SGD.step", 190, 9),
        *launched("six", 192, 210, 10, 6), *launched("seven", 205, 225, 10, 7),
    ]  # fmt: skip
    found = rows(events, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
    assert brief(found) == [
        ("one", 5, 20, 70), ("two", 5, 110, 140), ("three", 6, 150, 170), ("four", 6, 180, 185), ("five", 6, 186, 190),
        ("six", 6, 210, 220), ("seven", 7, 225, 235),
    ]  # fmt: skip
    assert [one.kind for one in found] == [
        Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD, Kind.FORWARD, Kind.OPTIMIZER, Kind.FORWARD,
    ]  # fmt: skip
    # A step lasts on the device from its first kernel to the next step's.
    assert brief(rows(events, Kind.STEP)) == [
        ("step 5", 5, 20, 150),
        ("step 6", 6, 150, 225),
        ("step 7", 7, 225, 235),
    ]


def test_kernels_without_launches_are_where_they_run() -> None:
    events = [step(5, 0, 100), step(6, 100, 100)]
    events += [span("kernel", f"k{at}", at, 30, tid=7, stream=7) for at in (5, 60, 110, 150)]
    assert brief(rows(events, Kind.FORWARD)) == [
        ("k5", 5, 5, 35), ("k60", 5, 60, 90), ("k110", 6, 110, 140), ("k150", 6, 150, 180),
    ]  # fmt: skip
    assert brief(rows(events, Kind.STEP)) == [("step 5", 5, 5, 110), ("step 6", 6, 110, 180)]


def test_a_kernel_whose_launch_was_lost_is_where_the_one_before_it_is() -> None:
    events = [
        step(5, 0, 100), step(6, 100, 100), span("kernel", "before recording began", 1, 3, correlation=99),
        *launched("one", 90, 120, 10, 1), span("kernel", "lost", 131, 5, correlation=2),
        *launched("two", 120, 140, 9, 3),
    ]  # fmt: skip
    assert brief(rows(events, Kind.FORWARD)) == [
        ("one", 5, 120, 130),
        ("lost", 5, 131, 136),
        ("two", 6, 140, 149),
    ]


def communication(*events: Entry) -> Event:
    """The one piece of communication among ``events`` in one step, with a kernel before it."""
    (found,) = rows(
        [step(5, 0, 200), *launched(KERNEL, 5, 10, 5, 900), *events], Kind.COLLECTIVE, Kind.SEND, Kind.RECEIVE
    )
    assert (found.stream, found.step) == (Stream.COMMUNICATION, 5)
    return found


def test_a_kernel_of_communication_that_describes_itself() -> None:
    found = communication(*launched(SUM, 20, 30, 40, 1, **OWN))
    assert (found.kind, found.name, found.group, found.sequence) == (Kind.COLLECTIVE, "all_reduce", "7", 41)
    assert (found.size_bytes, found.start_ns, found.duration_ns, found.bucket) == (2000, 30, 40, -1)
    assert found.algorithm == SUM


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("allreduce", "all_reduce"), ("_allgather_base", "all_gather"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("all_to_allv", "all_to_all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("gather", "gather"),
    ],
)  # fmt: skip
def test_names_of_operations(name: str, plain: str) -> None:
    assert communication(*launched(SUM, 20, 30, 40, 1, **{**OWN, "Collective name": name})).name == plain


@pytest.mark.parametrize(
    ("change", "size_bytes"),
    [
        ({"Out msg nelems": 8000}, 16000), ({"dtype": "Float8_e4m3fn"}, 1000), ({"dtype": "Oddity"}, -1),
        ({"In msg nelems": -5, "Out msg nelems": None}, -1), ({"In msg nelems": 2**60}, 2000),
        ({"In msg nelems": "7"}, 2000),
    ],
)  # fmt: skip
def test_the_size_is_the_whole_tensors(change: Entry, size_bytes: int) -> None:
    assert communication(*launched(SUM, 20, 30, 40, 1, **{**OWN, **change})).size_bytes == size_bytes


@pytest.mark.parametrize(
    ("seq", "sequence"), [("12", 12), (0, 0), (-1, -1), (1.5, -1), (2**70, -1), (None, -1)]
)
def test_sequences(seq: Any, sequence: int) -> None:
    """One without a number becomes the first of this rank's, which is 0."""
    found = read_document([step(5, 0, 200), *launched(SUM, 20, 30, 40, 1, **{**OWN, "Seq": seq})])
    assert found.events.of_kind(Kind.COLLECTIVE).sequence.tolist() == [sequence]


def test_messages_and_their_peers() -> None:
    sent = communication(
        *launched(
            "ncclDevKernel_SendRecv", 20, 30, 40, 1, **{**OWN, "Collective name": "send", "Dst Rank": 3}
        )
    )
    assert (sent.kind, sent.peer, sent.size_bytes, sent.sequence) == (Kind.SEND, 3, 2000, 41)
    got = communication(
        *launched(
            "ncclDevKernel_SendRecv", 20, 30, 40, 1, **{**OWN, "Collective name": "recv", "Src Rank": "2"}
        )
    )
    assert (got.kind, got.peer) == (Kind.RECEIVE, 2)
    both = communication(*launched("ncclDevKernel_SendRecv", 20, 30, 40, 1))
    assert (both.kind, both.name, both.peer) == (Kind.COLLECTIVE, "send_receive", -1)


def test_the_call_around_the_launch_describes_a_kernel_that_does_not() -> None:
    call = span("cpu_op", "record_param_comms", 18, 10, **OWN)
    found = communication(call, *launched(SUM, 20, 30, 40, 1))
    assert (found.name, found.group, found.sequence, found.size_bytes) == ("all_reduce", "7", 41, 2000)
    elsewhere = communication({**call, "tid": 9}, *launched(SUM, 20, 30, 40, 1))
    assert (elsewhere.name, elsewhere.group, elsewhere.size_bytes) == ("all_reduce", "", -1)
    before = communication({**call, "dur": 1}, *launched(SUM, 20, 30, 40, 1))
    assert before.group == ""


@pytest.mark.parametrize(
    ("name", "plain", "size_bytes"),
    [
        ("nccl:all_reduce", "all_reduce", 4000), ("nccl:_reduce_scatter_base", "reduce_scatter", 4000),
        ("nccl:all_to_all", "all_to_all", 4000), ("nccl:_all_gather_base", "all_gather", -1),  # a share of it
    ],
)  # fmt: skip
def test_an_annotation_around_the_launch_describes_it_where_nothing_else_does(
    name: str, plain: str, size_bytes: int
) -> None:
    args: Entry = {"Input Dims": [[10, 100]], "Input type": ["float"]}
    call = span("cpu_op", "record_param_comms", 17, 12)
    mark = span("user_annotation", name, 18, 10, **args)
    found = communication(
        call, mark, *launched("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 20, 30, 40, 1)
    )
    assert (found.name, found.size_bytes, found.group, found.sequence) == (plain, size_bytes, "", -1)


@pytest.mark.parametrize(
    ("kernel", "plain"),
    [
        (SUM, "all_reduce"), ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "all_gather"),
        ("void rccl_ReduceScatter<>()", "reduce_scatter"), ("ncclDevKernel_Generic_1(ncclDevComm*)", "collective"),
        ("ncclKernel_Reduce_RING", "reduce"), ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
    ],
)  # fmt: skip
def test_names_of_kernels_are_the_last_resort(kernel: str, plain: str) -> None:
    found = communication(*launched(kernel, 20, 30, 40, 1))
    assert (found.name, found.size_bytes) == (plain, -1)
    notes = read_document([step(5, 0, 200), *launched(kernel, 20, 30, 40, 1)]).notes
    assert "1 of 1 collectives have no recorded size." in notes


def test_kernels_that_only_sound_like_communication() -> None:
    events = [step(5, 0, 200), *launched("void pencclib_kernel()", 20, 30, 40, 1)]
    assert rows(events, Kind.COLLECTIVE) == []
    assert "No communication is recorded." in read_document(events).notes


def test_gradients_are_numbered_as_buckets() -> None:
    def reduced(at: int, number: int, **more: Any) -> list[Entry]:
        return launched(SUM, at, at + 1, 3, number, **{**OWN, "Seq": number, **more})

    small = {"In msg nelems": 1, "Out msg nelems": 1}
    events = [
        step(5, 0, 100), step(6, 100, 100), *reduced(5, 1, **small), span("cpu_op", BACKWARD, 10, 50), *reduced(20, 2),
        *reduced(25, 3, **{"Collective name": "broadcast"}),
        *reduced(30, 4, **{"Collective name": "_reduce_scatter_base"}),
        *reduced(70, 5, **small), span("cpu_op", BACKWARD, 110, 50), *reduced(120, 6),
    ]  # fmt: skip
    found = rows(events, Kind.COLLECTIVE)
    assert [(one.sequence, one.step, one.bucket) for one in found] == [
        (1, 5, -1), (2, 5, 0), (3, 5, -1), (4, 5, 1), (5, 5, -1), (6, 6, 0),
    ]  # fmt: skip


def test_where_the_time_of_a_device_goes() -> None:
    """Communication that nothing hides is waited for; then the loader; the rest is idle, by what the host was in."""
    events = [
        step(5, 0, 300), span("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 150, 40),
        *launched(KERNEL, 5, 10, 20, 1), *launched(SUM, 6, 20, 30, 2), *launched(KERNEL, 7, 80, 10, 3),
        span("cuda_runtime", "cudaStreamSynchronize", 60, 35), *launched(KERNEL, 100, 140, 10, 4),
        *launched(KERNEL, 195, 200, 5, 5), *launched(KERNEL, 196, 206, 5, 6),
    ]  # fmt: skip
    assert brief(rows(events, Kind.WAIT)) == [("communication", 5, 30, 50)]
    assert brief(rows(events, Kind.INPUT)) == [("data loader", 5, 150, 190)]
    assert brief(rows(events, Kind.IDLE)) == [
        ("launching", 5, 50, 80), ("synchronising", 5, 90, 140), ("launching", 5, 190, 200),
    ]  # fmt: skip
    whole = rows(events, Kind.STEP)[0]
    busy = sum(one.duration_ns for one in rows(events, Kind.FORWARD, Kind.WAIT, Kind.INPUT, Kind.IDLE))
    assert whole.duration_ns - busy == 1  # what lies between two kernels that were queued


def test_time_is_cut_where_steps_end() -> None:
    events = [
        step(5, 0, 100), step(6, 100, 100), *launched(KERNEL, 5, 10, 20, 1), *launched(SUM, 30, 40, 100, 2),
        *launched(KERNEL, 110, 120, 10, 3),
        span("user_annotation", "enumerate(DataLoader)#x", 180, 20), *launched(KERNEL, 190, 230, 10, 4),
    ]  # fmt: skip
    assert brief(rows(events, Kind.STEP)) == [("step 5", 5, 10, 120), ("step 6", 6, 120, 240)]
    assert brief(rows(events, Kind.WAIT)) == [("communication", 5, 40, 120), ("communication", 6, 130, 140)]
    assert brief(rows(events, Kind.INPUT)) == [("data loader", 6, 180, 200)]


def test_nothing_marks_steps() -> None:
    found = read_document(
        [*launched(KERNEL, 5, 10, 20, 1), *launched(SUM, 6, 40, 30, 2), *launched(KERNEL, 7, 90, 10, 3)]
    )
    assert [(one.step, one.duration_ns) for one in found.events.of_kind(Kind.STEP)] == [(0, 90_000)]
    assert any("everything counts as one step" in note for note in found.notes)


def test_only_communication_on_the_device() -> None:
    found = rows([step(5, 0, 100), *launched(SUM, 6, 40, 30, 2)], Kind.STEP, Kind.WAIT)
    assert brief(found) == [("step 5", 5, 40, 70), ("communication", 5, 40, 70)]
    assert rows([step(5, 50, 100), *launched(SUM, 6, 40, 30, 2)], Kind.STEP, Kind.WAIT, Kind.COLLECTIVE) == []


def test_groups_are_told_apart_from_the_events() -> None:
    told = {
        "pg_config": [
            {"pg_name": "7", "pg_desc": "dp", "ranks": [0, 8]},
            {"pg_name": 3},
            {"pg_name": "x", "ranks": "all"},
        ]
    }
    found = read_document(
        [step(5, 0, 200), *launched(SUM, 20, 30, 40, 1, **OWN)], rank=0, world=16, distributed=told
    )
    assert (found.groups, found.rank, found.world_size) == ({"7": (0, 8)}, 0, 16)


def test_a_bucket_is_ready_when_what_was_launched_before_it_is_done() -> None:
    """However long it then waits behind the bucket before it."""
    events = [
        step(5, 0, 100), span("cpu_op", BACKWARD, 10, 80),
        *launched(KERNEL, 11, 20, 10, 1), *launched(SUM, 12, 30, 40, 2, **OWN),
        *launched(KERNEL, 13, 32, 8, 3), *launched(SUM, 14, 70, 10, 4, **{**OWN, "Seq": 42}),
    ]  # fmt: skip
    found = rows(events, Kind.GRADIENT_READY)
    assert [(one.name, one.bucket, one.step, one.start_ns) for one in found] == [
        ("bucket 0", 0, 5, 30), ("bucket 1", 1, 5, 40),
    ]  # fmt: skip
