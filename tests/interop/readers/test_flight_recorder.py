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
from headway.interop.readers import flight_recorder
from headway.interop.readers.flight_recorder import LaunchedCommunication
from headway.interop.readers.foreign import Companion, Document
from headway.interop.readers.formats import SNIFFED_BYTES, readers

FIXTURES = Path(__file__).parent / "fixtures" / "flight_recorder"
DATA = [(FIXTURES / f"flight_recorder_rank_{rank}.json").read_bytes() for rank in range(2)]
PICKLE = (FIXTURES / "default_dump_rank_0.pickle").read_bytes()
SMALL: Any = json.loads(DATA[1])
SMALL["entries"] = SMALL["entries"][:8]

SETUP = [
    ("0", "all_gather", 16),
    ("0", "broadcast", 96),
    ("0", "broadcast", 18720),
]  # DDP compares and copies parameters
STEP = [  # what each step asks for, see ../execution_trace/make.py: group, name, bytes of the whole tensor
    ("0", "all_reduce", 18720), ("1", "all_reduce", 4000), ("0", "all_reduce", 4000), ("0", "broadcast", 40),
    ("0", "all_gather", 800), ("0", "all_reduce", 880),  # which was a reduce_scatter
    ("0", "all_to_all", 256), ("0", "all_gather", 240), ("1", "reduce", 132), ("1", "barrier", 0),
]  # fmt: skip
ROOT, OTHER = [("0", "gather", 96), ("0", "scatter", 112)], [("0", "gather", -1), ("0", "scatter", -1)]


def companion(data: bytes, *, lenient: bool = False, name: str = "dump.json", ending: str = "") -> Companion:
    reading = flight_recorder.read(Document(name, data, ending, lenient))
    assert not reading.ranks
    (found,) = reading.companions
    assert found.kind == "flight_recorder"
    return found


def recorded(data: bytes, *, lenient: bool = False, ending: str = "") -> LaunchedCommunication:
    content = companion(data, lenient=lenient, ending=ending).content
    assert isinstance(content, LaunchedCommunication)
    return content


def nccl_entry(**changes: object) -> dict[str, object]:
    """One entry as dumps of NCCL have it: messages name both ends by their places in the group."""
    return {
        "collective_seq_id": 4, "duration_ms": 1.5, "input_dtypes": ["BFloat16"], "input_sizes": [[8, 16]],
        "is_p2p": True, "op_id": 9, "output_dtypes": ["BFloat16"], "output_sizes": [[8, 16]], "p2p_seq_id": 3,
        "process_group": ["5", "pp"], "profiling_name": "nccl:send 1->0", "record_id": 0, "retired": True,
        "state": "completed", "time_created_ns": 1_700_000_000_000_000_000, **changes,
    }  # fmt: skip


def nccl_dump(*entries: dict[str, object]) -> bytes:
    config = {"5": {"name": "5", "desc": "pp", "ranks": "[4, 6]"}}
    return json.dumps({"entries": entries, "pg_config": config, "pg_status": {}, "version": "2.10"}).encode()


def test_collectives_of_gloo_have_group_sequence_and_size() -> None:
    for data, own in zip(DATA, (ROOT, [*OTHER, ("2", "all_reduce", 84)]), strict=True):
        found = recorded(data)
        rows = list(zip(found.group.tolist(), found.name.tolist(), found.size_bytes.tolist(), strict=True))
        assert rows[: len(SETUP + STEP + own)] == SETUP + STEP + own
        for group in set(found.group.tolist()):
            sequence = found.sequence[found.group == group]
            assert np.array_equal(sequence, np.arange(1, len(sequence) + 1))
        assert dict(zip(found.group.tolist(), found.description.tolist(), strict=True)).items() >= {
            ("0", "default_pg"), ("1", "pair"),
        }  # fmt: skip


def test_ranks_agree_on_sequences_within_groups() -> None:
    first, second = (recorded(data) for data in DATA)
    for group in ("0", "1"):
        names = [found.name[found.group == group].tolist() for found in (first, second)]
        assert names[0] == names[1]


def test_times_are_wall_clock_in_order_of_asking() -> None:
    found = recorded(DATA[0])
    assert (np.diff(found.created_ns) >= 0).all()
    assert found.created_ns[0] > 1_600_000_000_000_000_000
    assert set(found.dtype.tolist()) == {"Long", "Float", "Double", "Int", ""}


def test_gloo_counts_messages_without_telling_of_them() -> None:
    found = recorded(DATA[0])
    assert not found.message.any()
    pair = found.group == "1"
    assert found.operation[pair].tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]  # 4 and 8 were messages


def test_a_message_over_nccl_names_ranks_of_the_job() -> None:
    back = nccl_entry(
        profiling_name="nccl:recv 1<-0", p2p_seq_id=4, time_created_ns=1_700_000_000_000_000_500
    )
    found = companion(nccl_dump(back, nccl_entry()))
    content = found.content
    assert found.rank == 6  # the second of the group's ranks sends
    assert content.name.tolist() == ["send", "receive"]
    assert content.message.all()
    assert (content.peer.tolist(), content.sequence.tolist(), content.size_bytes.tolist()) == (
        [4, 4],
        [3, 4],
        [256, 256],
    )
    assert content.groups == {"5": (4, 6)}


def test_a_share_of_a_gather_tells_the_whole_where_the_group_is_known() -> None:
    entry = nccl_entry(profiling_name="nccl:gather", is_p2p=False, output_sizes=[], output_dtypes=[])
    assert recorded(nccl_dump(entry)).size_bytes.tolist() == [512]


def test_an_empty_dump_is_none_of_damage() -> None:
    found = recorded(b'{"comm_lib_version":"","pg_config":{},"pg_status":{},"version":"2.10"}')
    assert len(found) == 0


def test_the_rank_is_taken_from_the_name() -> None:
    assert companion(DATA[0], name="run/nccl_trace_rank_3").rank == 3
    assert companion(DATA[0], name="dump.json").rank is None


def test_a_pickle_is_recognised_and_never_opened() -> None:
    assert flight_recorder.recognises("nccl_trace_rank_0", PICKLE[:SNIFFED_BYTES])
    for lenient in (False, True):
        with pytest.raises(TraceError, match=r"is a pickle, which is never opened.*_dump_fr_trace_json"):
            companion(PICKLE, lenient=lenient)


def test_it_is_recognised_and_others_are_not() -> None:
    for data in DATA:
        assert flight_recorder.recognises("a", data[:SNIFFED_BYTES])
    assert not flight_recorder.recognises("a", b'{"traceEvents": [], "pg_config": {}, "comm_lib_version": 1}')
    assert not flight_recorder.recognises("a", b"\x80\x04}q\x00X\x03\x00\x00\x00abcq")
    assert not flight_recorder.recognises("a", b"")
    assert readers()["flight-recorder"].recognises("a", DATA[0])


def test_a_truncated_dump_is_refused_or_read_as_far_as_it_goes() -> None:
    cut = DATA[0][: len(DATA[0]) // 2]
    with pytest.raises(TraceError, match=r"dump.json is damaged"):
        recorded(cut)
    found = recorded(cut, lenient=True)
    assert 15 < len(found) < len(recorded(DATA[0]))
    assert found.dropped == 1
    with pytest.raises(TraceError, match="truncated"):
        recorded(DATA[0], ending="the compressed file is truncated")


def test_an_entry_that_cannot_be_is_refused_or_left_out() -> None:
    for changes in (
        {"profiling_name": None}, {"process_group": "5"}, {"time_created_ns": -5}, {"time_created_ns": 1e30},
        {"p2p_seq_id": "3"}, {"process_group": [["5"]]},
    ):  # fmt: skip
        data = nccl_dump(nccl_entry(**changes), nccl_entry())
        with pytest.raises(TraceError, match=r"dump.json is damaged"):
            recorded(data)
        found = recorded(data, lenient=True)
        assert (len(found), found.dropped) == (1, 1)


def check(data: bytes) -> None:
    for lenient in (False, True):
        assert len(refused(partial(recorded, data, lenient=lenient)).splitlines()) <= 1


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_damage_is_reported_and_nothing_else_escapes(draw: st.DataObject) -> None:
    data = draw.draw(st.sampled_from([b"", json.dumps(SMALL).encode(), PICKLE]))
    check(damaged_bytes(draw, data) if data else damaged_json(draw, SMALL))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"null", b'{"entries": 1}', b'{"entries": [1]}', b'{"entries": [{"time_created_ns": 1}]}',
        b'{"entries": [{"profiling_name": "nccl:all_reduce", "op_id": ' + b"9" * 100_000 + b"}]}",
        b'{"entries": ' + b"[" * 100_000, b'{"entries": [{"process_group": ' + b"[" * 100_000,
        b'{"entries": [' + b'{"record_id": [' * 20_000,
        nccl_dump(nccl_entry(input_sizes=[[2**40] * 16])), nccl_dump(nccl_entry(input_sizes=[[2**70]])),
    ],
)  # fmt: skip
def test_what_is_no_dump_is_reported(data: bytes) -> None:
    check(data)
