"""Recording operators through torch's profiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.commands import headway, torchrun

from headway.errors import UnsupportedError
from headway.recording.profiled import ProfiledSteps
from headway.trace.events import Kind
from headway.trace.folder import load_trace


def profiled(folder: Path, detail: str) -> ProfiledSteps:
    steps = ProfiledSteps(detail, folder, 0, first_step=5)  # type: ignore[arg-type]
    steps.recording_begins(0)
    for step in range(3):
        torch.ones(8, 8) @ torch.ones(8, 8)
        steps.step_ends(5 + step, 0, recorded=True)
    steps.end()
    return steps


def test_operators_carry_the_recorders_steps_and_nothing_stays_behind(tmp_path: Path) -> None:
    events = profiled(tmp_path, "operators").events()
    products = events.where(events.name == "aten::mm")
    assert products.step.tolist() == [5, 6, 7]
    assert set(events.kind.tolist()) == {Kind.OPERATOR}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:CUDA is not available, disabling CUDA profiling:UserWarning")  # so it is
def test_kernels_of_a_job_without_a_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no kernels were recorded"):
        profiled(tmp_path, "kernels").events()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_operators_lie_inside_the_passes_that_hooks_saw(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    done = headway(
        "record", "-o", out, "--steps", "3:8", "--detail", "operators", "--", *torchrun("train_small.py")
    )
    assert done.returncode == 0, done.stderr
    for events in load_trace(out).events.values():
        operators, passes = events.of_kind(Kind.OPERATOR), events.of_kind(Kind.FORWARD_PASS)
        linear = operators.where(operators.name == "aten::linear")
        inside = [
            ((passes.start_ns - 200_000 <= start) & (start <= passes.end_ns + 200_000)).any()
            for start in linear.start_ns.tolist()
        ]
        assert len(inside) == 3 * 5
        assert sum(inside) >= 0.8 * len(inside)  # two clocks are read apart on a busy machine
