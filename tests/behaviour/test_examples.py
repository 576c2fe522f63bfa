"""The examples that the documentation shows, run as it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.commands import headway, run

from headway.plan import Plan
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_the_example_in_code_trains_the_same_under_its_plan(tmp_path: Path) -> None:
    command = [*TORCHRUN, str(EXAMPLES / "in_code.py"), str(tmp_path)]
    done = run(command, 90, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1].split()
    assert float(said[1]) == pytest.approx(float(said[5]), rel=1e-4)
    assert load_trace(tmp_path / "trace").steps == tuple(range(3, 10))
    Plan.load(tmp_path / "plan.yaml")


@pytest.mark.parametrize("script", ["pipeline.py", "pipeline_module.py"])
def test_the_examples_of_pipelines_go_through_the_loop(tmp_path: Path, script: str) -> None:
    """The same losses under another order, that of a plan."""
    job = (*TORCHRUN, EXAMPLES / script)
    trace, plan = tmp_path / "trace", tmp_path / "plan.yaml"
    said = []
    for arguments in (
        ("record", "-o", trace, "--steps", "3:9", "--", *job),
        ("optimize", trace, "-o", plan),
        ("run", "--plan", plan, "--", *job),
    ):
        done = headway(*arguments)
        assert done.returncode == 0, done.stderr
        said += [line for line in done.stdout.splitlines() if line.startswith("loss ")]
    assert len(said) == 2
    assert said[0] == said[1]
    assert "of the last 64 digits right" in said[0]
    planned = Plan.load(plan).stages
    assert planned is not None
    assert [stage.parameters for stage in planned] == [
        len(each.parameters) for each in load_trace(trace).stages
    ]


@pytest.mark.parametrize("spec", sorted((EXAMPLES / "lab").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_lab_of_the_examples_can_be_read(spec: Path) -> None:
    from headway.lab.spec import load_spec

    assert load_spec(spec).world_size >= 2


def test_the_example_of_compressed_gradients_ends_where_whole_ones_do(tmp_path: Path) -> None:
    command = [*TORCHRUN, str(EXAMPLES / "compressed.py"), str(tmp_path)]
    done = run(command, 90, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1].split()
    assert float(said[1]) == pytest.approx(float(said[5]), rel=0.05)
