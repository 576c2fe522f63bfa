"""Recording as the lab starts ranks: one ``headway record`` a rank, hosts with names of their own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests import limits
from tests.commands import SCRIPTS, headway, record_into

from headway.collectives.algorithms import ALL_REDUCE, NATIVE, sent_bytes
from headway.diagnosis.diagnosis import diagnose
from headway.trace.events import Kind
from headway.trace.folder import load_trace

SKEWED = Path(__file__).parents[2] / "benchmarks" / "planting" / "skewed.py"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def test_every_rank_records_and_rank_0_assembles(tmp_path: Path) -> None:
    record = (*record_into(tmp_path / "trace"), "--")
    job = (sys.executable, SCRIPTS / "train_small.py")
    done = headway("lab", "run", "--mode", "loopback", "--hosts", 2, "--", *record, *job)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] Recorded 5 steps of 2 ranks" in done.stdout
    trace = load_trace(tmp_path / "trace")
    assert trace.hosts == {0: "host0", 1: "host1"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_hosts_that_each_start_torchrun_record_one_trace(tmp_path: Path) -> None:
    record = (*record_into(tmp_path / "trace"), "--")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1)
    job = shlex.join(map(str, (*record, *torchrun)))
    place = f"--node-rank $RANK --master-addr $MASTER_ADDR --master-port 29533 {SCRIPTS / 'train_small.py'}"
    done = headway("lab", "run", "--hosts", 2, "--", "sh", "-c", f"{job} {place}")
    assert done.returncode == 0, done.stderr
    assert "[rank 0] Recorded 5 steps of 2 ranks" in done.stdout
    assert "[rank 1] headway: rank 0's launcher on host0 wrote" in done.stderr
    assert load_trace(tmp_path / "trace").hosts == {0: "host0", 1: "host1"}


def test_clocks_of_one_machine_are_found_to_agree(tmp_path: Path) -> None:
    job = (sys.executable, SCRIPTS / "train_small.py")
    lab = (sys.executable, "-m", "headway", "lab", "run", "--mode", "loopback", "--hosts", 2, "--")
    done = headway("record", "-o", tmp_path / "trace", "--steps", "3:8", "--", *lab, *job)
    assert done.returncode == 0, done.stderr
    first, second = load_trace(tmp_path / "trace").manifest.ranks
    assert first.clock.offset_ns == 0
    # Both read the machine's one monotonic clock, so the truth is 0.
    assert abs(second.clock.offset_ns) <= second.clock.uncertainty_ns


@pytest.mark.parametrize(
    "hosts", [3, *(pytest.param(hosts, marks=pytest.mark.exhaustive) for hosts in (2, 4))]
)
def test_connections_carry_what_a_ring_all_reduce_sends(hosts: int, tmp_path: Path) -> None:
    record = (*record_into(tmp_path / "trace"), "--")
    job = (sys.executable, SCRIPTS / "train_small.py", "--steps", "9", "--width", "600")
    done = headway("lab", "run", "--hosts", hosts, "--", *record, *job)
    assert done.returncode == 0, done.stderr
    trace = load_trace(tmp_path / "trace")
    neighbours = {}
    for rank, events in trace.events.items():
        links = events.of_kind(Kind.LINK)
        carried = {peer: int(links.size_bytes[links.peer == peer].sum()) for peer in set(links.peer.tolist())}
        reduced = [row for row in events.of_kind(Kind.COLLECTIVE) if row.name == ALL_REDUCE]
        expected = sum(sent_bytes(NATIVE, ALL_REDUCE, hosts, row.size_bytes) for row in reduced)
        assert expected > 1_000_000
        neighbours[rank] = max(carried, key=lambda peer: carried[peer])
        assert carried[neighbours[rank]] == pytest.approx(expected, rel=0.1)
        assert sum(carried.values()) == pytest.approx(expected, rel=0.1)
        assert set(links.step.tolist()) == set(trace.steps)
        assert set(events.of_kind(Kind.DELIVERY_RATE).peer.tolist()) <= set(carried)
    # Gloo's ring goes through all ranks, in one direction.
    (away,) = {(peer - rank) % hosts for rank, peer in neighbours.items()}
    assert away in (1, hosts - 1)
    found = {(link.source, link.target) for link in diagnose(trace).links}
    assert {(f"host{rank}", f"host{peer}") for rank, peer in neighbours.items()} <= found


@pytest.mark.parametrize("ahead_ms", [pytest.param(0.0, marks=pytest.mark.exhaustive), 40.0])
def test_clocks_are_told_by_causality_where_no_port_may_be_opened(
    ahead_ms: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skewed: tuple[object, ...] = ()
    if ahead_ms:
        skewed = (sys.executable, SKEWED)
        permitted = subprocess.run(
            [*map(str, skewed), "true"], env={**os.environ, "RANK": "0", "SKEW_MS": json.dumps({"0": 1.0})},
            capture_output=True, text=True, timeout=limits.stretched(30), check=False,
        )  # fmt: skip
        if permitted.returncode:
            pytest.skip(f"clocks cannot be set here: {permitted.stderr.strip()}")
    record = record_into(tmp_path / "trace", "3:13")
    job = (sys.executable, SCRIPTS / "train_small.py")
    monkeypatch.setenv("SKEW_MS", json.dumps({"1": ahead_ms}))
    lab = ("lab", "run", "--mode", "loopback", "--hosts", 2, "--")
    done = headway(*lab, *skewed, *record, "--no-clock-server", "--", *job)
    assert done.returncode == 0, done.stderr
    first, second = (info.clock for info in load_trace(tmp_path / "trace").manifest.ranks)
    assert (first.offset_ns, first.uncertainty_ns) == (0, 0)
    assert second.by == "causality"
    assert second.uncertainty_ns < 1e9
    # But for what was set, both read the machine's one clock. The uncertainty covers nineteen of twenty fits and the
    # processes of other tests delay one rank's messages more than the other's, so a test can ask for a multiple only.
    assert abs(second.offset_ns + ahead_ms * 1e6) <= 5 * second.uncertainty_ns
