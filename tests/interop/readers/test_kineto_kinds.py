"""Documents of other libraries, other years and other tools: which kernels are communication, and whose."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.diagnosis.nccl_jobs import BACKWARD, FORWARD, Ask, Await, Compute, Job, documents, play
from tests.interop.readers.kineto_documents import (
    Entry,
    document,
    launched,
    span,
    step,
)
from tests.interop.readers.kineto_documents import (
    read_document as read_events,
)
from tests.interop.readers.test_kineto_devices import OWN

from headway.diagnosis.diagnosis import diagnose
from headway.errors import TraceError
from headway.interop.readers.document import on_disk, read_document
from headway.interop.readers.foreign import Document, ForeignRank
from headway.interop.readers.importing import import_trace
from headway.interop.readers.kineto.reader import read
from headway.interop.readers.ranks import name_groups_by_members
from headway.trace.events import Events, Kind, texts
from headway.trace.folder import load_trace

ASKED = {key: value for key, value in OWN.items() if key != "Seq"} | {"Seq": 3}


def communication(events: list[Entry], **head: Any) -> list[tuple[str, int, int, int]]:
    """Name, sequence, size and length in us of each collective."""
    found = read_events(events, rank=0, **head).events.of_kind(Kind.COLLECTIVE)
    return [(row.name, row.sequence, row.size_bytes, row.duration_ns // 1000) for row in found]


def asked(at: float, lasts: float) -> Entry:
    return span("cpu_op", "record_param_comms", at, lasts, **ASKED)


@pytest.mark.parametrize(
    "kernel",
    ["oneccl_allreduce_small<float, 2>", "void some_library::exchange<4>", "Memcpy DtoD (Device -> Device)"],
)
def test_what_is_launched_where_communication_is_asked_for_is_communication(kernel: str) -> None:
    events = [
        step(1, 0, 100),
        *launched("gemm", 5, 10, 20, 1),
        asked(40, 10),
        *launched(kernel, 42, 50, 30, 2),
    ]
    assert communication(events) == [("all_reduce", 3, 2000, 30)]


def test_several_kernels_of_one_call_are_one_collective() -> None:
    events = [
        step(1, 0, 100), *launched("gemm", 5, 10, 20, 1), asked(40, 10),
        *launched("Memcpy PtoP", 42, 50, 10, 2), *launched("Memcpy PtoP", 44, 60, 15, 3),
    ]  # fmt: skip
    assert communication(events) == [("all_reduce", 3, 2000, 25)]


def test_what_prepares_the_tensors_of_a_named_kernel_is_computation() -> None:
    events = [
        step(1, 0, 100), asked(40, 20), *launched("CatArrayBatchedCopy", 42, 50, 10, 2),
        *launched("ncclDevKernel_AllReduce_Sum_f32", 44, 60, 15, 3),
    ]  # fmt: skip
    assert communication(events) == [("all_reduce", 3, 2000, 15)]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void vllm::cross_device_reduce_1stage<float, 4>", "all_reduce"),
        ("multimem_all_reduce_kernel<bf16>", "all_reduce"),
        ("void two_shot_all_reduce_kernel", "all_reduce"),
        ("deep_ep::internode::dispatch<true>", "all_to_all"),
        ("deep_ep::intranode::combine<bf16>", "all_to_all"),
        ("nvshmemi_transfer_allgather", "all_gather"),
    ],
)
def test_libraries_that_are_asked_by_nobody_are_known_by_their_kernels(kernel: str, name: str) -> None:
    events = [step(1, 0, 100), *launched(kernel, 42, 50, 30, 2)]
    assert communication(events) == [(name, -1, -1, 30)]


def test_categories_of_2021() -> None:
    events = [
        step(1, 0, 100), span("Runtime", "cudaLaunchKernel", 5, 2, correlation=1),
        span("Kernel", "sgemm", 10, 20, tid=7, correlation=1),
        span("Runtime", "cudaLaunchKernel", 8, 2, correlation=2),
        span("Kernel", "ncclKernel_AllReduce_RING_LL_Sum_float", 30, 20, tid=9, correlation=2),
    ]  # fmt: skip
    assert [row[0] for row in communication(events)] == ["all_reduce"]


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE])
def test_byte_order_marks(mark: bytes, tmp_path: Path) -> None:
    text = document([step(1, 0, 100), *launched("gemm", 5, 10, 20, 1)], rank=0).decode()
    data = text.encode() if mark == codecs.BOM_UTF8 else text.encode("utf-16-le")
    (tmp_path / "rank0.json").write_bytes(mark + data)
    found = read_document(on_disk(tmp_path / "rank0.json"))
    assert len(read(found).ranks[0].events)


def test_a_merged_document_is_split_by_its_labels() -> None:
    events = []
    for place in (1, 0):
        own = [
            step(1, 0, 100),
            *launched("gemm", 5, 10, 20, 1),
            asked(40, 10),
            *launched("x", 42, 50 + place, 30, 2),
        ]
        events += [{**entry, "pid": f"[TP0{place}-DP00] {entry['pid']}"} for entry in own]
    ranks = read(Document("merged.json", document(events))).ranks
    assert [rank.rank for rank in ranks] == [0, 1]
    starts = [int(rank.events.of_kind(Kind.COLLECTIVE).start_ns[0]) for rank in ranks]
    assert starts[1] - starts[0] == 1000
    assert all("in the order of their labels" in " ".join(rank.notes) for rank in ranks)


def test_operators_of_several_processes_are_refused_where_nothing_tells_their_kernels_apart() -> None:
    events = [{**step(1, 0, 100), "pid": pid} for pid in (1, 2)]
    with pytest.raises(TraceError, match="mixes several processes without labels"):
        read(Document("merged.json", document(events)))


def gloo(name: str, call_us: float, start_us: float, numel: int, *, as_name: str = "") -> list[Entry]:
    """What a plain profiler records of a collective: nothing numbers its call or its annotation."""
    shape: Entry = {"Input Dims": [[[numel]]], "Input type": ["TensorList"], "Record function id": 0}
    mine: Entry = {"Input Dims": [[numel]], "Input type": ["float"], "Record function id": 0}
    return [
        span("cpu_op", f"c10d::{name}_", call_us, 2, **shape),
        span("user_annotation", f"gloo:{as_name or name}", start_us, 10, tid=2, **mine),
    ]


def test_calls_and_annotations_that_nothing_numbers_pair_in_their_order() -> None:
    events = [
        step(1, 0, 100), *gloo("allreduce", 10, 30, 64), *gloo("allreduce", 14, 22, 128),
        *gloo("reduce_scatter", 18, 45, 256, as_name="all_reduce"), *gloo("allreduce", 50, 60, 64),
    ]  # fmt: skip
    found = read_events(events, rank=0).events.of_kind(Kind.COLLECTIVE)
    assert [(row.name, row.size_bytes, (row.start_ns - row.enqueue_ns) // 1000) for row in found] == [
        ("all_reduce", 512, 8), ("all_reduce", 256, 20), ("reduce_scatter", 1024, 27), ("all_reduce", 256, 10),
    ]  # fmt: skip


def test_groups_are_their_members() -> None:
    def rank(groups: dict[str, tuple[int, ...]]) -> ForeignRank:
        events = Events.from_columns(
            kind=Kind.COLLECTIVE, name="all_reduce", stream="communication", group=texts(list(groups)),
            step=np.zeros(len(groups), dtype=np.int64), start_ns=np.arange(len(groups)),
            duration_ns=np.ones(len(groups), dtype=np.int64),
        )  # fmt: skip
        return ForeignRank("x", "pytorch", events, groups=groups)

    alike = {r: rank({"0": (0, 1, 2, 3), "1": (r // 2 * 2, r // 2 * 2 + 1)}) for r in range(4)}
    name_groups_by_members(alike)
    assert [one.events.group.tolist() for one in alike.values()] == [
        ["0", "1 (ranks 0, 1)"], ["0", "1 (ranks 0, 1)"], ["0", "1 (ranks 2, 3)"], ["0", "1 (ranks 2, 3)"],
    ]  # fmt: skip
    apart = {0: rank({"a": (0, 1), "b": (0, 1)}), 1: rank({"c": (0, 1), "d": (0, 1)})}
    name_groups_by_members(apart)
    assert [one.events.group.tolist() for one in apart.values()] == [["a", "b"], ["a", "b"]]


def job(programme: list[Any], ranks: int, **more: Any) -> Job:
    everybody = tuple(range(ranks))
    hosts = more.pop("hosts", ["h0"] * ranks)
    return Job("made", [programme] * ranks, {"dp": everybody}, {"dp": 200.0}, hosts, noise=0.0, **more)


DDP = [
    Compute(30, FORWARD), Compute(50, BACKWARD), Ask("dp", "all_reduce", 2**26, BACKWARD, key="a"), Await("a"),
]  # fmt: skip


def imported(made: Job, folder: Path) -> Any:
    (folder / "in").mkdir()
    for name, data in documents(made, play(made)).items():
        (folder / "in" / name).write_bytes(data)
    import_trace(folder / "in", folder / "trace")
    return load_trace(folder / "trace")


def test_goodput_counts_all_ranks_of_a_group(tmp_path: Path) -> None:
    made = job(DDP, 16, hosts=[f"h{rank}" for rank in range(16)], missing=tuple(range(2, 16)))
    links = diagnose(imported(made, tmp_path)).links
    assert [(link.source, link.target) for link in links] == [("h0", "h1")]
    assert links[0].gbps == pytest.approx(200, rel=0.01)


def test_a_flight_recorder_of_nobody_is_noted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    made = job(DDP, 2)
    for name, data in documents(made, play(made)).items():
        (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in" / "dump.json").write_text('{"entries": [], "pg_config": {}, "pg_status": {}}')
    notes = import_trace(tmp_path / "in", tmp_path / "trace").manifest.notes
    assert any("dump.json was not used: its rank is unknown" in note for note in notes)


def test_a_step_whose_kernels_were_lost_is_left_out() -> None:
    events: list[Entry] = []
    for number in range(4):
        events.append(step(number, 1000 * number, 1000))
        for at in range(20):
            call, kernel = launched(
                "gemm", 1000 * number + 10 * at, 1000 * number + 20 + 10 * at, 5, 100 * number + at
            )
            events += [call] if number == 0 and at < 12 else [call, kernel]
    found = read_events(events, rank=0)
    assert found.events.whole_steps == {1, 2, 3}
    assert any(note.startswith("Step 0 is left out: the profiler lost 60%") for note in found.notes)


def test_communication_that_overlaps_itself_on_a_stream_is_doubted() -> None:
    kernels = [
        span("kernel", "ncclDevKernel_AllReduce", at, 30, tid=9, correlation=number, stream=9)
        for number, at in enumerate((10, 20, 60))
    ]
    assert any(
        note.startswith("1 communication kernels overlap")
        for note in read_events([step(1, 0, 100), *kernels], rank=0).notes
    )


def test_a_job_without_communication_is_not_called_all_computation(tmp_path: Path) -> None:
    made = job([Compute(30, FORWARD), Compute(50, BACKWARD)], 2)
    verdict = diagnose(imported(made, tmp_path)).verdict
    assert verdict.startswith("Nothing stands out in what was recorded, but no communication was.")
    assert verdict.endswith("may be communication.")
