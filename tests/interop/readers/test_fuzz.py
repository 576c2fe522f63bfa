"""Every reader, through imports of harmed recordings: what comes out is a trace or one line, soon, in little memory.

``benchmarks/fuzz_readers.py`` runs the same kinds of cases in thousands.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exhaustive import examples
from tests.interop.readers.fuzzing import cases
from tests.interop.readers.fuzzing.cases import (
    CRASHED,
    GOOD,
    JOBS,
    LARGE,
    LITTERED,
    SLOW,
    WORDY,
    make_case,
    run_case,
)

from headway.errors import TraceError
from headway.interop.readers.formats import SHIPPED

NAMES = list(JOBS)


def test_every_format_is_among_the_cases() -> None:
    assert {reader.name for reader in SHIPPED} <= {job.split()[0].rstrip(",") for job in JOBS}


@settings(max_examples=examples(60))
@given(st.sampled_from(NAMES), st.integers(0, 2**32))
def test_harm_is_reported_and_nothing_else_escapes(job: str, seed: int) -> None:
    outcome = run_case(make_case(random.Random(seed), job))
    assert outcome.kind in GOOD, f"{outcome.kind} after {outcome.seconds:.1f} s: {outcome.said}"


def _take_long(*_arguments: object, **_options: object) -> None:
    begin = time.process_time()
    while time.process_time() < begin + 0.2:
        pass
    raise TraceError("late")


def _take_much(*_arguments: object, **_options: object) -> None:
    raise TraceError(f"large: {np.ones(160 * 2**20, dtype=np.int8).sum()}")


def _raise(*_arguments: object, **_options: object) -> None:
    raise KeyError("missing")


def _forge(*_arguments: object, **_options: object) -> None:
    error = TraceError("one")
    error.args = ("one\nheadway: two",)
    raise error


def _litter(source: Path, out: Path, **_options: object) -> None:
    (out.parent / ".out.half").write_text("half")
    raise TraceError("half")


@pytest.mark.parametrize(
    ("act", "kind"),
    [(_take_long, SLOW), (_take_much, LARGE), (_raise, CRASHED), (_forge, WORDY), (_litter, LITTERED)],
)
def test_what_should_not_be_is_seen(
    monkeypatch: pytest.MonkeyPatch, act: Callable[..., None], kind: str
) -> None:
    case = make_case(random.Random(1), "chakra, small")
    assert run_case(case).kind in GOOD
    monkeypatch.setattr(cases, "import_trace", act)
    monkeypatch.setattr(cases, "LIMIT_BYTES", 2**20)
    monkeypatch.setattr(cases, "LIMIT_S", 0.1 if kind == SLOW else 60)
    assert run_case(case).kind == kind
