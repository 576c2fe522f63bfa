"""Plans are measured with short runs of an unmodified command, through the command line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.commands import headway, last_line, torchrun

from headway.errors import LaunchError
from headway.integrations import short_runs
from headway.integrations.short_runs import ShortRuns
from headway.plan import Plan
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LONG = ("--steps", 3000)
STEP_MS = 10.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "trace"
    done = headway("record", "-o", folder, "--steps", "4:9", "--", *torchrun("train_small.py"))
    assert done.returncode == 0, done.stderr
    return folder


def test_short_runs_decide_and_end_before_the_script_does(recorded: Path, tmp_path: Path) -> None:
    losses, plan_path = tmp_path / "losses.json", tmp_path / "plan.yaml"
    command = torchrun("train_small.py", *LONG, "--losses", losses)
    done = headway(
        "optimize",
        recorded,
        "-o",
        plan_path,
        "--measure",
        "1",
        "--strategy",
        "decoupled",
        "--json",
        "--",
        *command,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measured"]
    kept, tried = (next(each for each in measured["plans"] if each["kept"] is kept) for kept in (True, False))
    assert kept["name"].startswith("DDP")
    assert tried["name"].startswith("decoupled")
    assert measured["runs"] == 4
    assert [each["rounds"] for each in (kept, tried)] == [2, 2]
    assert measured["taken"] == kept["name"] or tried["measured_ms"] < kept["measured_ms"]
    assert Plan.load(plan_path).strategy.name == ("ddp" if measured["taken"] == kept["name"] else "decoupled")
    assert all(each["spread_ms"] >= 0 and each["predicted_ms"] > 0 for each in (kept, tried))
    assert done.stderr.count("headway: run ") == 4
    assert not losses.exists()  # what comes behind the loop was not reached
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.fixture
def runs(tmp_path: Path) -> ShortRuns:
    return ShortRuns(torchrun("train_on.py"), tmp_path, 2, STEP_MS)


def test_a_script_that_does_not_let_go_runs_to_its_end_and_is_timed(runs: ShortRuns) -> None:
    made = runs.run(None, 12)
    assert made.went_on
    assert len(made.steps_ms) == 12
    assert all(step > 0 for step in made.steps_ms)


def test_a_script_that_ends_first_is_timed_as_far_as_it_comes(tmp_path: Path) -> None:
    made = ShortRuns(torchrun("train_small.py", "--steps", 12), tmp_path, 2, STEP_MS).run(None, 100)
    assert not made.went_on
    assert len(made.steps_ms) == 7
    with pytest.raises(LaunchError, match="too few steps"):
        ShortRuns(torchrun("train_small.py", "--steps", 6), tmp_path / "again", 2, STEP_MS).run(None, 100)


def test_a_command_that_fails_says_why(tmp_path: Path, recorded: Path) -> None:
    with pytest.raises(LaunchError, match="before all ranks finished their timed steps"):
        ShortRuns(torchrun("train_small.py", "--fault", "crash"), tmp_path, 2, STEP_MS).run(None, 10)
    wrong = tmp_path / "wrong.yaml"
    model = load_trace(recorded).model
    Plan.data_parallel(DecoupledStrategy(bucket_cap_bytes=2**20), 2, model).save(wrong)
    with pytest.raises(LaunchError, match="another model"):
        ShortRuns(torchrun("train_small.py", "--width", 8), tmp_path, 2, STEP_MS).run(wrong, 10)


def test_a_command_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_runs, "BEGINNING_S", 15.0)
    hangs = torchrun("train_small.py", "--fault", "hang")
    with pytest.raises(LaunchError, match=r"took too long.* no 10 steps in 1\d s"):
        ShortRuns(hangs, tmp_path, 2, STEP_MS).run(None, 10)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "--fault hang" not in left


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--measure", "1"), "no command to run"),
        (("--", "torchrun", "train.py"), "only used to measure"),
        (("--measure", "1", "--follow-network", "--", "torchrun", "train.py"), "follow the network"),
        (("--measure", "1", "--", "torchrun", "--nproc-per-node", "3", "train.py"), "3 workers"),
        (
            ("--measure", "1", "--", "torchrun", "--nnodes", "2", "--nproc-per-node", "1", "t.py"),
            "several launchers",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], said: str, recorded: Path, tmp_path: Path
) -> None:
    done = headway("optimize", recorded, "-o", tmp_path / "plan.yaml", *arguments)
    assert done.returncode == 2
    assert said in last_line(done.stderr)
    assert not (tmp_path / "plan.yaml").exists()


def test_stock_ddp_is_measured_under_a_plan_as_any_other(recorded: Path, tmp_path: Path) -> None:
    plan_path = tmp_path / "stock.yaml"
    model = load_trace(recorded).model
    Plan.data_parallel(DistributedDataParallelStrategy(), 2, model).save(plan_path)
    made = ShortRuns(torchrun("train_small.py", *LONG), tmp_path, 2, STEP_MS).run(plan_path, 10)
    assert len(made.steps_ms) == 10
    assert not made.went_on
