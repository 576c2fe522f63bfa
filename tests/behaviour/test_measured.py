"""Jobs that measure their links and machines when the last step is recorded, and go on as if they had not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import workers
from tests.behaviour import halting_cases
from tests.commands import headway, torchrun

from headway.cluster import DEFERRED_UPDATE, RUNTIME_COSTS
from headway.replayer.replayer import Replayer
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

JOB = torchrun("train_measured.py")


def test_a_recorded_job_measures_its_machine_and_goes_on_as_before(tmp_path: Path) -> None:
    printed = []
    for name, measuring in (("plain", False), ("measured", True)):
        done = headway(
            "record", "-o", tmp_path / name, "--steps", "3:8", "--", *JOB, timeout_s=200, measuring=measuring
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ("measuring links and cores" in done.stderr) == measuring
        printed.append(done.stdout.splitlines()[0])
    assert printed[0] == printed[1]

    assert load_trace(tmp_path / "plain").cluster is None
    trace = load_trace(tmp_path / "measured")
    assert trace.cluster is not None
    assert {*RUNTIME_COSTS, DEFERRED_UPDATE, "ring", "servers"} <= set(trace.cluster.algorithms)
    assert trace.cluster.decoupled_slowdown is None or trace.cluster.decoupled_slowdown.forward < 10
    assert Replayer(trace).cluster.source == "measured after the recording"


def test_all_ranks_stop_measuring_where_one_is_told_to_end(tmp_path: Path) -> None:
    found = workers.run(2, "tests.behaviour.halting_cases:told_on_one_rank", str(tmp_path))
    assert found == [[rank == 1, halting_cases.TOLD_AT, [], 2.0, True] for rank in range(2)]
