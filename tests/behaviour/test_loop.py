"""The loop through the command line, on real processes: record, diagnose, replay, optimize, run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median

import pytest
import yaml
from tests.commands import headway, last_line, torchrun

from headway.job import Job
from headway.replayer.replayer import Replayer
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.events import Kind
from headway.trace.folder import load_trace
from headway.trace.format import Trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    losses = folder / "stock.json"
    done = headway(
        "record",
        "-o",
        folder / "trace",
        "--steps",
        "4:12",
        "--",
        *torchrun("train_small.py", "--losses", losses),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Recorded 8 steps of 2 ranks")
    return folder


@pytest.fixture(scope="module")
def trace(recorded: Path) -> Trace:
    return load_trace(recorded / "trace")


def assert_nothing_is_left_out(folder: Path) -> None:
    """A step of a few milliseconds on a shared machine, in which thread switches weigh more than transfers do, and
    links fitted from the trace itself: the law is tested on exact traces."""
    replayer = Replayer(load_trace(folder))
    replayed_ms = median(replayer.replay().step_times_ms)
    assert 0.25 < replayed_ms / median(replayer.recorded_step_times_ms) < 4


def test_nothing_is_left_beside_the_trace(recorded: Path) -> None:
    assert not [path.name for path in recorded.iterdir() if path.name.startswith(".")]


def test_every_rank_and_step_shows_what_a_step_is_made_of(trace: Trace) -> None:
    assert trace.steps == tuple(range(4, 12))
    for events in trace.events.values():
        for step in trace.steps:
            rows = list(events.of_step(step))
            kinds = {row.kind for row in rows}
            assert {Kind.INPUT, Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.GRADIENT_READY,
                    Kind.COLLECTIVE, Kind.OPTIMIZER, Kind.STEP} <= kinds  # fmt: skip
            assert sorted(r.name for r in rows if r.kind == Kind.GRADIENT_READY) == sorted(
                trace.model.by_name
            )
            assert {r.name for r in rows if r.kind == Kind.FORWARD} == {"0", "1", "2", "3", "4", "5"}
            for row in rows:
                assert row.duration_ns >= 0
                if row.kind == Kind.COLLECTIVE:
                    assert row.enqueue_ns <= row.start_ns <= row.end_ns


def test_collectives_have_one_sequence_on_all_ranks(trace: Trace) -> None:
    def signature(rank: int) -> list[tuple[str, str, int, int, int]]:
        rows = trace.events[rank].of_kind(Kind.COLLECTIVE)
        return [(r.group, r.name, r.sequence, r.size_bytes, r.bucket) for r in rows]

    assert sorted(signature(0)) == sorted(signature(1))
    names = {name for _, name, *_ in signature(0)}
    assert {"all_reduce", "broadcast"} <= names  # gradients and the loss; batch norm's buffers


def test_the_policy_decides_the_buckets_that_ddp_really_used(trace: Trace) -> None:
    decided = DistributedDataParallelStrategy().decide(Job.of(trace.model))
    assert tuple(sorted(b.parameters) for b in decided.buckets) == tuple(
        sorted(bucket) for bucket in trace.manifest.ranks[0].buckets
    )
    sizes = {r.bucket: r.size_bytes for r in trace.events[0].of_kind(Kind.COLLECTIVE) if r.bucket >= 0}
    assert sizes == {bucket.index: bucket.size_bytes for bucket in decided.buckets}


def test_the_loss_and_the_buffers_are_blocking(trace: Trace) -> None:
    waits = {row.name for row in trace.events[0].of_kind(Kind.WAIT)}
    assert {"all_reduce", "broadcast"} <= waits


def test_diagnose_prints_one_document_whose_parts_add_up(recorded: Path) -> None:
    done = headway("diagnose", recorded / "trace", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {"headway", "kind", "verdict", "step_ms", "breakdown_ms", "stragglers", "critical_path", "clock",
            "links"} <= set(document)  # fmt: skip
    mean = sum(sum(parts.values()) for parts in document["breakdown_ms"].values()) / 2
    assert mean == pytest.approx(document["step_ms"], rel=1e-3)
    words = headway("diagnose", recorded / "trace")
    assert words.stdout.splitlines()[0] == document["verdict"]


def test_replay_reproduces_the_recorded_step_and_answers_what_ifs(recorded: Path) -> None:
    base = json.loads(headway("replay", recorded / "trace", "--json").stdout)
    assert {
        "step_ms",
        "breakdown_ms",
        "peak_bytes",
        "operations",
        "elapsed_s",
        "recorded_step_ms",
        "error",
    } <= set(base)
    assert_nothing_is_left_out(recorded / "trace")
    halved = json.loads(headway("replay", recorded / "trace", "--what-if", "compute=0.5x", "--json").stdout)
    assert halved["step_ms"] < base["step_ms"]
    more = json.loads(headway("replay", recorded / "trace", "--what-if", "workers=8", "--json").stdout)
    assert len(more["peak_bytes"]) == 8


@pytest.mark.parametrize("strategy", ["ddp", "decoupled"])
def test_a_plan_runs_and_trains_what_the_stock_script_trains(
    recorded: Path, strategy: str, tmp_path: Path
) -> None:
    plan, losses = tmp_path / "plan.yaml", tmp_path / "losses.json"
    found = headway("optimize", recorded / "trace", "-o", plan, "--strategy", strategy, "--json")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    times = [one["predicted_ms"] for one in document["plans"]]
    assert times[0] <= 1.01 * min(times)
    assert {"baseline_ms", "bound_ms", "searched", "elapsed_s"} <= set(document)
    done = headway("run", "--plan", plan, "--", *torchrun("train_small.py", "--losses", losses))
    assert done.returncode == 0, done.stderr
    begin, end = (line for line in done.stderr.splitlines() if line.startswith("headway: "))
    assert re.fullmatch(r"headway: running under .*, on 2 ranks; predicted .* ± .* ms a step", begin)
    assert re.match(r"headway: [\d.]+ ms a step, over the last \d+; predicted .*, recorded before ", end)
    stock, planned = json.loads((recorded / "stock.json").read_text()), json.loads(losses.read_text())
    assert planned["losses"] == pytest.approx(stock["losses"], rel=1e-5)
    assert planned["checksum"] == pytest.approx(stock["checksum"], rel=1e-4)


def test_a_decoupled_run_can_be_recorded_and_replayed_too(recorded: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    assert headway("optimize", recorded / "trace", "-o", plan, "--strategy", "decoupled").returncode == 0
    job = torchrun("train_small.py")
    run = (sys.executable, "-m", "headway", "run", "--plan", plan, "--", *job)
    done = headway("record", "-o", tmp_path / "trace", "--steps", "4:12", "--", *run)
    assert done.returncode == 0, done.stderr
    trace = load_trace(tmp_path / "trace")
    names = {row.name for row in trace.events[0].of_kind(Kind.COLLECTIVE) if row.bucket >= 0}
    assert names == {"reduce_scatter", "all_gather"}
    assert len(trace.events[0].of_kind(Kind.UPDATE))
    assert_nothing_is_left_out(tmp_path / "trace")
    assert headway("replay", tmp_path / "trace", "--json").returncode == 0


def test_a_plan_for_another_model_ends_the_run_with_one_line_and_status_2(
    recorded: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    assert headway("optimize", recorded / "trace", "-o", plan).returncode == 0
    done = headway("run", "--plan", plan, "--", *torchrun("train_small.py", "--width", 96))
    assert done.returncode == 2
    assert last_line(done.stderr).startswith("headway: the plan is for another model; got")
    text = yaml.safe_load(plan.read_text())
    plan.write_text(yaml.safe_dump(text | {"mesh": {"data": 3}}))
    done = headway("run", "--plan", plan, "--", *torchrun("train_small.py"))
    assert done.returncode == 2
    assert "another world size; got 2 workers; expected 3" in last_line(done.stderr)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "the command failed with status 1 before anything was recorded"),
        ("never-step", "0 optimizer steps"),
        ("no-group", "of which no process initialised a process group"),
    ],
)
def test_a_job_that_gives_nothing_to_record_gets_one_line_and_leaves_nothing(
    tmp_path: Path, fault: str, said: str
) -> None:
    done = headway("record", "-o", tmp_path / "trace", "--", *torchrun("train_small.py", "--fault", fault))
    assert done.returncode == 2
    assert said in last_line(done.stderr)
    assert last_line(done.stderr).startswith("headway: ")
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_crashes_after_its_recorded_steps_leaves_its_trace(tmp_path: Path) -> None:
    """With --json stdout is one document, whatever the job prints."""
    done = headway(
        "record", "-o", tmp_path / "trace", "--steps", "3:8", "--json", "--",
        "sh", "-c", 'echo printed by the job; exec "$@"', "sh", *torchrun("train_small.py", "--fault", "late-crash"),
    )  # fmt: skip
    assert done.returncode == 2
    assert json.loads(done.stdout)["kind"] == "recording"
    assert "printed by the job" in done.stderr
    assert "contains the steps up to then" in last_line(done.stderr)
    assert load_trace(tmp_path / "trace").steps == (3, 4, 5, 6, 7)
