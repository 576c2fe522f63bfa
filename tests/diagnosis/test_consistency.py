"""Recordings that mislead: first steps that profilers began apart, and what cannot all be true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.diagnosis.nccl_jobs import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Ask,
    Await,
    Compute,
    Job,
    Operation,
    documents,
    play,
)

from headway.diagnosis.diagnosis import Diagnosis, diagnose
from headway.interop.readers.importing import import_trace
from headway.trace.events import Kind
from headway.trace.folder import load_trace
from headway.trace.format import Trace

STEP: list[Operation] = [
    Compute(10, FORWARD), Compute(15, BACKWARD), Ask("dp", "all_reduce", 2**24, BACKWARD, key="a"),
    Compute(15, BACKWARD), Ask("dp", "all_reduce", 2**24, BACKWARD, key="b"), Await("a"), Await("b"),
    Compute(2, OPTIMIZER),
]  # fmt: skip


def job(gbps: float = 200.0, **more: object) -> Job:
    made = Job("ddp", [STEP] * 4, {"dp": (0, 1, 2, 3)}, {"dp": gbps}, ["h0"] * 4, steps=8, noise=0.002)
    return replace(made, **more)  # type: ignore[arg-type]


def trace_of(made: Job, folder: Path, late_ms: dict[int, float] | None = None) -> Trace:
    """The imported recording; the ranks in ``late_ms`` begin to record so much later, and all wait for them."""
    played = play(made)
    for kernel in played.kernels:
        latest_us = 1e3 * max((late_ms or {0: 0.0}).values())
        own_us = 1e3 * (late_ms or {}).get(kernel.rank, 0.0)
        if isinstance(kernel.operation, Compute) and kernel.step == 0 and kernel.operation.phase != OPTIMIZER:
            kernel.start_us += own_us
            kernel.end_us += own_us
        elif isinstance(kernel.operation, Ask) and kernel.step == 0:
            kernel.start_us += own_us
            kernel.end_us += latest_us
        else:
            kernel.start_us += latest_us
            kernel.end_us += latest_us
    (folder / "in").mkdir()
    for name, data in documents(made, played).items():
        (folder / "in" / name).write_bytes(data)
    import_trace(folder / "in", folder / "trace")
    return load_trace(folder / "trace")


def accused(said: Diagnosis) -> list[int]:
    return [
        rank for one in said.findings if one.cause == "straggler" and one.stands_out for rank in one.ranks
    ]


def test_a_rank_whose_profiler_began_late_is_no_straggler(tmp_path: Path) -> None:
    said = diagnose(trace_of(job(), tmp_path, late_ms={3: 15_000.0}))
    assert said.steps == tuple(range(1, 8))
    assert said.step_ms < 60
    assert accused(said) == []
    assert said.notes[0].startswith("Step 0 is left out: the recording of rank 3 begins 15")


def test_a_trace_that_cannot_be_true_blames_nobody(tmp_path: Path) -> None:
    trace = trace_of(job(), tmp_path)
    events = trace.events[2]
    # As a clock that is off would have its communication.
    off_ns = np.where(events.kind == Kind.COLLECTIVE, 30_000_000, 0)
    moved = replace(events, start_ns=events.start_ns + off_ns, enqueue_ns=events.enqueue_ns + off_ns)
    said = diagnose(replace(trace, events={**trace.events, 2: moved}))
    assert said.verdict.startswith(
        "The trace contradicts itself: 16 of 16 collectives end on one rank before another"
    )
    assert said.stragglers == ()
    assert accused(said) == []


@pytest.mark.parametrize("slowdown", [1.0, 1.25])
def test_a_rank_that_delays_what_others_hide_is_found_as_a_faster_one_would_show(
    slowdown: float, tmp_path: Path
) -> None:
    made = job(gbps=6.0, slow={1: slowdown})  # buckets queue until the step ends
    said = diagnose(trace_of(made, tmp_path))
    gained_ms = play(made).step_ms - play(made, slow=False).step_ms
    assert accused(said) == ([1] if slowdown > 1 else [])
    if slowdown > 1:
        assert said.stragglers[0].hidden_ms == pytest.approx(gained_ms, rel=0.1)
        assert "communication that all ranks wait for begins late by" in " ".join(
            one.sentence for one in said.findings
        )


def test_what_does_not_stand_out_is_no_sentence(tmp_path: Path) -> None:
    document = diagnose(trace_of(job(), tmp_path)).to_document()
    assert not all(one["stands_out"] for one in document["findings"])
    assert all(("sentence" in one) == one["stands_out"] for one in document["findings"])
