from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from tests.interop.settings.tuner_reader import ALGORITHMS, COLLECTIVES, PROTOCOLS, Choice, answer

from headway.errors import UserError
from headway.interop.settings.tuner_table import ANY_SIZE, TunerRule, read_table, table

RULES = (
    TunerRule("allreduce", 1000, 2000, "tree", "ll", 4, 2, 16),
    TunerRule("allreduce", 0, ANY_SIZE, "ring", "simple", 8),
    TunerRule("allgather", 0, 100, "ring", "ll128", 2, ranks=8, registered=1),
)
ASKED = [
    ("allreduce", 1000, 2, 16), ("allreduce", 2000, 2, 16), ("allreduce", 2001, 2, 16), ("allreduce", 1500, 1, 16),
    ("allreduce", 5 * 2**30, 4, 32), ("allgather", 100, 1, 8), ("allgather", 101, 1, 8), ("reduce", 1, 1, 8),
]  # fmt: skip


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tuner.csv"
    path.write_text(table(RULES, ["two words", "x" * 1000]))
    assert read_table(path) == RULES
    assert max(map(len, path.read_text().splitlines())) < 255, "readers cut longer lines in two"
    assert path.read_text().count("#") == 2


def test_fields_that_say_nothing_are_left_out() -> None:
    assert RULES[1].line() == f"allreduce,0,{ANY_SIZE},ring,simple,8,-1,-1"
    assert RULES[2].line() == "allgather,0,100,ring,ll128,2,-1,8,-1,1"


def test_readers_answer_as_the_rules_say() -> None:
    text = table(RULES)
    assert answer(text, "allreduce", 1500, 2, 16) == Choice("tree", "ll", 4)
    assert answer(text, "allreduce", 1500, 4, 16) == Choice("ring", "simple", 8)
    assert answer(text, "allreduce", 5 * 2**30, 4, 16) == Choice("ring", "simple", 8), (
        "beyond four gigabytes too"
    )
    assert answer(text, "broadcast", 1500, 4, 16) == Choice("", "", 1), "the trap: NCCL then uses one channel"
    assert answer(text, "broadcast", 1500, 4, 16, rccl=True) == Choice("", "", 0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("all_reduce,0,1,ring,simple,1,-1,-1", "line 2 contains an unknown name"),
        ("allreduce,0,1,Ring,simple,1,-1,-1", "got Ring"),
        ("allreduce,0,1,ring,simpel,1,-1,-1", "got simpel"),
        ("allreduce,0,1,ring,simple,1,-1", "got 7 fields"),
        ("allreduce,0,1,ring,simple,1,-1,-1,-1,-1,7", "got 11 fields"),
        ("allreduce,0,1,ring,simple,1,-1,-1" + " " * 250, "in 2[0-9][0-9] characters"),
        ("allreduce,2,1,ring,simple,1,-1,-1", "got 2 to 1 bytes"),
        ("allreduce,-1,1,ring,simple,1,-1,-1", "got -1 to 1 bytes"),
        ("allreduce,0,64K,ring,simple,1,-1,-1", "got 64K"),
        ("allreduce,0,1,ring,simple,,-1,-1", "not a number"),
        ("allreduce,0,1,ring,simple,-2,-1,-1", "out of range"),
        (f"allreduce,0,{2**64},ring,simple,1,-1,-1", "out of range"),
        ("allreduce,0,1,ring,simple,\u0664,-1,-1", "not a number"),
        ("allreduce,0," + "9" * 60 + ",ring,simple,1,-1,-1", "not a number"),
    ],
)
def test_what_a_reader_would_take_for_something_else_is_refused(
    tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "tuner.csv"
    path.write_text(f"# fields\n{line}\n")
    with pytest.raises(UserError, match=complaint):
        read_table(path)


def test_a_table_that_is_missing_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        read_table(tmp_path / "no")
    (tmp_path / "large").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(UserError, match="too large"):
        read_table(tmp_path / "large")


# The real reader -----------------------------------------------------------------------------------------

_Table = (ctypes.c_float * len(PROTOCOLS)) * len(ALGORITHMS)
_GET = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(_Table), ctypes.c_int,
    ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int),
)  # fmt: skip
_INIT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip
_END = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _Tuner(ctypes.Structure):
    """ncclTuner_v5_t."""

    _fields_ = [("name", ctypes.c_char_p), ("init", _INIT), ("get", _GET), ("end", _END)]


def _real_answer(plugin: str, collective: str, size_bytes: int, nodes: int, ranks: int) -> Choice:
    tuner = _Tuner.in_dll(ctypes.CDLL(plugin), "ncclTunerPlugin_v5")
    context = ctypes.c_void_p()
    assert tuner.init(ctypes.byref(context), 0, ranks, nodes, None, None, None) == 0
    costs, channels = _Table(), ctypes.c_int(0)
    for row in costs:
        for place in range(len(PROTOCOLS)):
            row[place] = 5.0
    kind = COLLECTIVES.index(collective)
    assert tuner.get(context, kind, size_bytes, 1, ctypes.byref(costs), len(ALGORITHMS), len(PROTOCOLS), 0,
                     ctypes.byref(channels)) == 0  # fmt: skip
    tuner.end(context)
    chosen = [(a, p) for a, row in zip(ALGORITHMS, costs, strict=True) for p, cost in zip(PROTOCOLS, row, strict=True)
              if cost == 0.0]  # fmt: skip
    assert len(chosen) <= 1
    return Choice(*(chosen[0] if chosen else ("", "")), channels.value)


@pytest.fixture
def plugin() -> str:
    path = os.environ.get("NCCL_TUNER_PLUGIN", "")
    if not Path(path).is_file():
        pytest.skip("NCCL_TUNER_PLUGIN names no built tuner of NCCL's plugins/tuner/example")
    return path


@pytest.mark.parametrize("question", ASKED)
def test_nccls_own_tuner_answers_the_same(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: tuple[str, int, int, int]
) -> None:
    rules = tuple(rule for rule in RULES if rule.registered == -1)
    path = tmp_path / "tuner.csv"
    path.write_text(table(rules, ["a comment"]))
    monkeypatch.setenv("NCCL_TUNER_CONFIG_FILE", str(path))
    assert _real_answer(plugin, *question) == answer(path.read_text(), *question)
