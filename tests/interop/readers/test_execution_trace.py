import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.damaging import damaged_bytes, damaged_json, refused

from headway.errors import TraceError
from headway.interop.readers import execution_trace
from headway.interop.readers.execution_trace import ExecutedCommunication
from headway.interop.readers.foreign import Document
from headway.interop.readers.formats import SNIFFED_BYTES, readers

FIXTURES = Path(__file__).parent / "fixtures" / "execution_trace"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "traces"
DATA = [
    gzip.decompress((FIXTURES / f"execution_trace_rank_{rank}.json.gz").read_bytes()) for rank in range(2)
]
SMALL: Any = json.loads(DATA[1])
SMALL["nodes"] = [node for node in SMALL["nodes"] if node["name"].startswith(("c10d", "gloo", "##"))][:12]

STEP = [  # what each step of the job asks for, see make.py: name, bytes of the whole tensor
    ("broadcast", 20), ("broadcast", 4), ("all_reduce", 18720), ("all_reduce", 4000), ("all_reduce", 4000),
    ("broadcast", 40), ("all_gather", 800), ("reduce_scatter", 880), ("all_to_all", 256), ("all_gather", 240),
    ("reduce", 132), ("barrier", 0),
]  # fmt: skip
ROOT, OTHER = (
    [("gather", 96), ("scatter", 112), ("send", 308)],
    [("gather", -1), ("scatter", -1), ("receive", 308)],
)


def executed(
    data: bytes, *, lenient: bool = False, name: str = "rank3.json", ending: str = ""
) -> ExecutedCommunication:
    reading = execution_trace.read(Document(name, data, ending, lenient))
    assert not reading.ranks
    (companion,) = reading.companions
    assert companion.kind == "execution_trace"
    assert isinstance(companion.content, ExecutedCommunication)
    lengths = {len(getattr(companion.content, field)) for field in ("call", "annotation", "name", "group", "sequence",
                                                                    "size_bytes", "peer")}  # fmt: skip
    assert lengths == {len(companion.content)}
    return companion.content


def first_step(found: ExecutedCommunication) -> list[tuple[str, int]]:
    """The operations of the first recorded step: DDP broadcasts where its buckets begin, in that step only."""
    return list(zip(found.name.tolist(), found.size_bytes.tolist(), strict=True))[: len(STEP) + 3]


def test_operations_of_gloo_are_named_and_sized_as_the_script_asked_for_them() -> None:
    assert first_step(executed(DATA[0])) == STEP + ROOT
    assert first_step(executed(DATA[1])) == STEP + OTHER


def test_a_message_names_its_other_end() -> None:
    found = executed(DATA[0])
    assert found.peer[found.name == "send"].tolist() == [1, 1]
    found = executed(DATA[1])
    assert found.peer[found.name == "receive"].tolist() == [0, 0]
    assert set(found.peer[found.name != "receive"].tolist()) == {-1}


def test_a_call_and_what_the_backend_announces_belong_together() -> None:
    for data, rank in zip(DATA, range(2), strict=True):
        found = executed(data)
        kineto = json.loads(gzip.decompress((FIXTURES / f"kineto_rank_{rank}.json.gz").read_bytes()))
        names = {
            event["args"]["Record function id"]: event["name"]
            for event in kineto["traceEvents"]
            if "Record function id" in event.get("args", {})
        }
        calls = [names[number] for number in found.call.tolist()]
        announced = [names[number] for number in found.annotation.tolist()]
        assert all(name.startswith("c10d::") for name in calls)
        assert all(name.startswith("gloo:") for name in announced)
        scattered = [
            told for told, name in zip(announced, found.name, strict=True) if name == "reduce_scatter"
        ]
        assert scattered == ["gloo:all_reduce"] * 2  # which is why the call has to be asked


def test_process_groups_are_told() -> None:
    assert executed(DATA[0]).groups == {"0": (0, 1), "1": (0, 1)}
    assert executed(DATA[1]).groups == {"0": (0, 1), "1": (0, 1), "2": (1,)}
    assert executed(DATA[1]).descriptions == {"0": "default_pg", "1": "pair", "2": "second"}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the third-party traces are not here")
def test_a_trace_of_nccl_tells_group_sequence_and_size() -> None:
    data = gzip.decompress((SHARED / "pytorch_et_resnet_rank_of2.json.gz").read_bytes())
    found = executed(data)
    assert len(found) == 21  # 27 are recorded, 6 of which wait
    assert found.groups == {"0": (0, 1)}
    assert set(found.group.tolist()) == {"0"}
    assert np.array_equal(found.sequence, np.arange(33, 54))
    gradients = found.size_bytes[found.name == "all_reduce"]
    assert gradients.tolist() == [8196000, 31502336, 26255360, 26550272, 9724160] * 3
    assert int(gradients[:5].sum()) == 25_557_032 * 4  # ResNet-50's parameters


def test_a_message_over_nccl_names_a_rank_of_the_job() -> None:
    attributes: dict[str, object] = {
        "rf_id": 7, "collective_name": "send", "dtype": "BFloat16", "in_msg_nelems": 10,
        "out_msg_nelems": 10, "pg_name": "5",
    }  # fmt: skip
    groups = '[{"pg_name": "5", "pg_desc": "pp", "ranks": [4, 6], "group_size": 2}]'
    document = {
        "schema": "1.1.1-chakra.0.0.4",
        "nodes": [
            {"id": 3, "name": "## process_group:init ##", "ctrl_deps": 2, "inputs": {"values": [groups]},
             "attrs": [{"name": "rf_id", "value": 1}]},
            {"id": 9, "name": "record_param_comms", "ctrl_deps": 8,
             "inputs": {"values": [[[1, 2, 0, 10, 2, "cuda:0"]], [12, True], ["5", "pp"], 1, "send", [], [], -1, 1]},
             "attrs": [{"name": name, "value": value} for name, value in attributes.items()]},
        ],
    }  # fmt: skip
    found = executed(json.dumps(document).encode())
    assert found.name.tolist() == ["send"]
    assert (found.peer.tolist(), found.sequence.tolist(), found.size_bytes.tolist()) == ([6], [12], [20])


def test_the_rank_is_taken_from_the_name() -> None:
    assert (
        execution_trace.read(Document("run/execution_trace_rank_1.json.gz", DATA[1])).companions[0].rank == 1
    )
    assert execution_trace.read(Document("run/et.json", DATA[1])).companions[0].rank is None


def test_it_is_recognised_and_others_are_not() -> None:
    assert execution_trace.recognises("a", DATA[0][:SNIFFED_BYTES])
    kineto = gzip.decompress((FIXTURES / "kineto_rank_0.json.gz").read_bytes())
    assert not execution_trace.recognises("a", kineto[:SNIFFED_BYTES])
    assert not execution_trace.recognises("a", b"")
    assert readers()["execution-trace"].recognises("a", DATA[0][:300])


def test_a_truncated_trace_is_refused_or_read_as_far_as_it_goes() -> None:
    cut = DATA[0][: len(DATA[0]) * 2 // 3]
    with pytest.raises(TraceError, match=r"rank3.json is damaged"):
        executed(cut)
    found = executed(cut, lenient=True)
    assert 15 <= len(found) < len(executed(DATA[0]))
    assert any("damaged" in note for note in found.notes)
    with pytest.raises(TraceError, match="truncated"):
        executed(DATA[0], ending="the compressed file is truncated")


def check(data: bytes) -> None:
    for lenient in (False, True):
        assert len(refused(partial(executed, data, lenient=lenient)).splitlines()) <= 1


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_damage_is_reported_and_nothing_else_escapes(draw: st.DataObject) -> None:
    small = json.dumps(SMALL).encode()
    check(damaged_json(draw, SMALL) if draw.draw(st.booleans()) else damaged_bytes(draw, small))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b'{"nodes": 1}', b'{"nodes": [1]}', b'{"nodes": [{"name": 1}]}',
        b'{"nodes": [{"name": "c10d::allreduce_", "id": ' + b"9" * 100_000 + b"}]}",
        b'{"nodes": ' + b"[" * 100_000, b'{"nodes": [{"name": "c10d::x", "inputs": ' + b'{"a":' * 50_000,
        b'{"nodes": [' + b'{"id": [' * 20_000,
    ],
)  # fmt: skip
def test_what_is_no_trace_is_reported(data: bytes) -> None:
    check(data)
