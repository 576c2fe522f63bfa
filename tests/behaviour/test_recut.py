"""Recorded jobs as pipelines that they are not: proposed, replayed, refused by headway run, and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import headway, last_line, run, torchrun

from headway.cluster import Cluster
from headway.errors import PlanError
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.job import Job
from headway.optimization.recut import recuts
from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import simulate
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.trace.events import Kind
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
ROWS, WIDTH = 8, 96  # of train_chain.py


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks under DistributedDataParallel."""
    folder = tmp_path_factory.mktemp("chain")
    script = torchrun("train_chain.py", "--losses", folder / "stock.json")
    done = headway("record", "-o", folder / "trace", "--steps", "3:8", "--", *script)
    assert done.returncode == 0, done.stderr
    done = headway(
        "optimize", folder / "trace", "-o", folder / "pipeline.yaml", "--strategy", "pipeline", "--json"
    )
    assert done.returncode == 0, done.stderr
    (folder / "found.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, of six layers and of two."""
    folder = tmp_path_factory.mktemp("uneven")
    done = headway("record", "-o", folder / "trace", "--steps", "4:8", "--", *torchrun("train_uneven.py"))
    assert done.returncode == 0, done.stderr
    return folder


def plans(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_the_recording_says_what_modules_hand_on(chain: Path) -> None:
    noted = load_trace(chain / "trace").model.chain
    assert noted is not None
    assert [link.name for link in noted.links] == [str(each) for each in range(7)]
    assert [link.output_bytes for link in noted.links] == [4 * ROWS * WIDTH] * 6 + [0]
    assert noted.samples == ROWS


def test_pipelines_stand_among_the_plans_and_are_written_when_asked_for(chain: Path) -> None:
    found = plans(chain)
    assert {each["followed_by"] for each in found["plans"]} == {"headway run"}
    assert {each["followed_by"] for each in found["plans_for_other_scripts"]} == {"headway.parallelize"}
    described = yaml.safe_load((chain / "pipeline.yaml").read_text())
    assert described["mesh"] == {"pipeline": 2}
    (point,) = described["parallel"]["pipeline"]["pipeline"]["split_points"]
    assert point in [str(each) for each in range(1, 7)]


def test_its_step_is_that_of_a_job_reckoned_from_the_spans(chain: Path) -> None:
    """Stages by the spans of their modules in the recording, which the timeline of a step must come to."""
    trace = load_trace(chain / "trace")
    replayer = Replayer(trace)
    plan = Plan.load(chain / "pipeline.yaml")
    strategy = plan.strategy
    assert isinstance(strategy, PipelineStrategy)
    assert strategy.micro_batches == 8
    played = replayer.replay(strategy)
    first = int(strategy.split_points[0])
    timelines = {}
    for rank, events in trace.events.items():
        of_stage = {Part.FORWARD: 0, Part.BACKWARD: 0}
        for row in events.of_kind(Kind.FORWARD, Kind.BACKWARD):
            place = int(row.name.partition(".")[0]) if row.name[0].isdigit() else 6
            if (place >= first) == bool(rank):
                of_stage[row.kind] += row.duration_ns // len(trace.steps)
        timelines[rank] = (
            Timeline(
                rank, 0,
                tuple(
                    Item(part, duration_ns=of_stage[part] // 4, stage=rank, micro_batch=each)
                    for part in (Part.FORWARD, Part.BACKWARD)
                    for each in range(8)
                ),
            ),
        )  # fmt: skip
    cluster: Cluster = replayer.cluster
    by_hand = Job(
        played.job.stages, 2, cluster, Computation(timelines), boundary_bytes=(4 * ROWS * WIDTH // 4,)
    )
    least_ms = simulate(by_hand, strategy).step_ms
    assert 0.8 * least_ms < played.step_ms, "updates, losses and what is between modules come on top"
    assert played.step_ms < 3 * least_ms + replayer.recorded_step_ms


def test_replay_says_the_same_of_the_plan(chain: Path) -> None:
    done = headway("replay", chain / "trace", "--plan", chain / "pipeline.yaml", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    planned = yaml.safe_load((chain / "pipeline.yaml").read_text())["prediction"]
    assert said["predicted_ms"] == pytest.approx(planned["step_ms"])
    assert said["uncertainty_ms"] == pytest.approx(planned["uncertainty_ms"])


def test_the_script_as_it_is_cannot_follow_it(chain: Path) -> None:
    done = headway("run", "--plan", chain / "pipeline.yaml", "--", *torchrun("train_chain.py"))
    assert done.returncode == 2
    assert "the plan was not applied" in last_line(done.stderr)
    assert "call headway.parallelize" in last_line(done.stderr)


def test_with_parallelize_it_trains_what_data_parallel_does(chain: Path) -> None:
    script = torchrun("train_chain.py", "--plan", chain / "pipeline.yaml", "--losses", chain / "planned.json")
    done = run(list(script), 90)
    assert done.returncode == 0, done.stderr
    stock, planned = (json.loads((chain / f"{name}.json").read_text()) for name in ("stock", "planned"))
    assert planned == pytest.approx(stock, rel=1e-4)


def test_pipelines_side_by_side_are_proposed_and_trained_on_their_mesh(tmp_path: Path) -> None:
    """Of a model with a forward of its own, recorded data parallel on four ranks; stages begin inside of it."""
    script = ("train_chain.py", "--residual", "--steps", "6")
    stock = torchrun(*script, "--losses", tmp_path / "stock.json", workers=4)
    done = headway("record", "-o", tmp_path / "trace", "--steps", "3:6", "--no-measuring", "--", *stock)
    assert done.returncode == 0, done.stderr
    replayer = Replayer(load_trace(tmp_path / "trace"))
    proposed = next(
        each for each in recuts(replayer, ()).pipelines if isinstance(each.strategy, MeshStrategy)
    )
    assert isinstance(proposed.strategy, MeshStrategy)
    (point,) = proposed.strategy.pipeline.split_points
    assert point in ("head", *(f"blocks.{each}" for each in range(5)))
    plan = Plan.on_mesh(proposed.strategy, proposed.job.mesh, proposed.job.stages)
    plan.save(tmp_path / "plan.yaml")
    replayer.check(plan)
    for given in ((), ("--mesh",)):
        losses = ("--losses", tmp_path / "planned.json", *given)
        done = run(list(torchrun(*script, "--plan", tmp_path / "plan.yaml", *losses, workers=4)), 90)
        assert done.returncode == 0, done.stderr
        stock_losses, planned = (
            json.loads((tmp_path / f"{name}.json").read_text()) for name in ("stock", "planned")
        )
        assert planned == pytest.approx(stock_losses, rel=1e-4)


def test_stages_are_split_anew_by_what_their_modules_took(uneven: Path) -> None:
    trace = load_trace(uneven / "trace")
    for stage, names in zip(trace.stages, ("012345", "67"), strict=True):
        assert stage.chain is not None
        assert [link.name for link in stage.chain.links] == list(names)
        assert all(link.forward_ns > 0 and link.backward_ns > 0 for link in stage.chain.links)
    replayer = Replayer(trace)
    halves = PipelineStrategy(micro_batches=4, split_points=("4",))
    as_it_is = replayer.replay(PipelineStrategy(micro_batches=4, split_points=("6",)))
    assert as_it_is.job.stages == trace.stages
    assert [len(each.parameters) for each in replayer.replay(halves).job.stages] == [8, 8]
    with pytest.raises(PlanError, match="cannot be split at the plan's split_points"):
        replayer.replay(PipelineStrategy(micro_batches=4, split_points=("head",)))


def test_another_split_is_written_replayed_and_trained(uneven: Path) -> None:
    """By hand, as what gains most depends on a busy machine's times."""
    trace = load_trace(uneven / "trace")
    replayer = Replayer(trace)
    strategy = PipelineStrategy(micro_batches=4, split_points=("4",))
    plan = Plan.pipeline(strategy, replayer.job_under(strategy).stages)
    plan.save(uneven / "halves.yaml")
    replayer.check(plan)
    done = run(list(torchrun("train_uneven.py", "--plan", uneven / "halves.yaml")), 90)
    assert done.returncode == 0, done.stderr
    with pytest.raises(PlanError, match="the plan is for another stage 0"):
        replayer.check(Plan.pipeline(strategy, trace.stages))
