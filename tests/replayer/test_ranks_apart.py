"""Traces whose ranks recorded different numbers of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.synthetic import SyntheticJob, synthetic_trace, with_ranks, write_trace

from headway.diagnosis.diagnosis import diagnose
from headway.errors import TraceError
from headway.replayer.incomplete import check_same_steps
from headway.replayer.replayer import Replayer
from headway.trace.folder import assemble, load_trace, write_rank
from headway.trace.format import Trace

JOB = SyntheticJob(world_size=2, steps=8, jitter=0.1)


def without_steps(folder: Path, rank: int, *steps: int) -> Trace:
    """A trace of the job of which one rank recorded no event of some steps."""
    whole = load_trace(write_trace(JOB, folder))
    rows = [row for row in whole.events[rank] if row.step not in steps]
    write_rank(folder, whole.manifest.ranks[rank], whole.model, rows)
    assemble(folder)
    return load_trace(folder)


def test_ranks_that_did_not_step_together_are_diagnosed_and_not_replayed(tmp_path: Path) -> None:
    steps = synthetic_trace(JOB).steps
    trace = without_steps(tmp_path / "trace", 1, *steps[-3:])
    assert trace.steps == steps[:-3]
    assert len(diagnose(trace).step_times_ms) == len(steps) - 3
    with pytest.raises(TraceError, match="8 steps on rank 0, 5 on rank 1") as caught:
        Replayer(trace)
    assert "\n" not in str(caught.value)
    check_same_steps(with_ranks(trace, {0: {"source": "profile.json"}}))


def test_a_step_that_one_rank_lacks_is_left_out_on_all(tmp_path: Path) -> None:
    whole = synthetic_trace(JOB)
    trace = without_steps(tmp_path / "trace", 1, whole.steps[0])
    assert Replayer(trace).recorded_step_times_ms == Replayer(whole).recorded_step_times_ms[1:]
