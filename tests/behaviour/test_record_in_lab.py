"""Recording as the lab starts ranks: one ``headway record`` a rank, hosts with names of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.commands import SCRIPTS, headway

from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_every_rank_records_and_rank_0_assembles(tmp_path: Path) -> None:
    record = (sys.executable, "-m", "headway", "record", "-o", tmp_path / "trace", "--steps", "3:8", "--")
    job = (sys.executable, SCRIPTS / "train_small.py")
    done = headway("lab", "run", "--mode", "loopback", "--hosts", 2, "--", *record, *job)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] Recorded 5 steps of 2 ranks" in done.stdout
    trace = load_trace(tmp_path / "trace")
    assert trace.hosts == {0: "host0", 1: "host1"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_clocks_of_one_machine_are_found_to_agree(tmp_path: Path) -> None:
    job = (sys.executable, SCRIPTS / "train_small.py")
    lab = (sys.executable, "-m", "headway", "lab", "run", "--mode", "loopback", "--hosts", 2, "--")
    done = headway("record", "-o", tmp_path / "trace", "--steps", "3:8", "--", *lab, *job)
    assert done.returncode == 0, done.stderr
    first, second = load_trace(tmp_path / "trace").manifest.ranks
    assert first.clock.offset_ns == 0
    # Both read the machine's one monotonic clock, so the truth is 0.
    assert abs(second.clock.offset_ns) <= second.clock.uncertainty_ns
