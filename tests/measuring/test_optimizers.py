from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.answers.asked import JOB, written
from tests.synthetic import synthetic_trace
from torch import nn

from headway import torch_private
from headway.cli.main import run
from headway.errors import UnsupportedError
from headway.job import Job, OptimizerUse
from headway.measuring.passes import measured_optimizers, pass_of
from headway.passes.compile import Compile
from headway.passes.input_workers import InputWorkers
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.strategies.live.module_spec import model_spec

CPU = torch.device("cpu")
SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch as pip installs it, on a machine without a GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def job(*names: str, state: int = 0) -> Job:
    spec = model_spec(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)))
    spec = spec.model_copy(update={"optimizer_state_bytes": state * spec.size_bytes})
    return replace(Job.of(spec, 2), optimizers=OptimizerUse(names, 1))


def test_every_implementation_that_torch_has_is_measured() -> None:
    found = measured_optimizers(job("AdamW", state=2), CPU, rounds=2)
    assert set(found) == {"optimizer foreach AdamW", "optimizer fused AdamW"}
    assert all(each.factor > 0 for each in found.values())
    size_bytes = job().model.size_bytes
    assert found["optimizer foreach AdamW"].held_bytes >= size_bytes, "all denominators at once"
    assert found["optimizer fused AdamW"].held_bytes < size_bytes / 10
    assert set(measured_optimizers(job("RMSprop", state=1), CPU, rounds=2)) == {"optimizer foreach RMSprop"}


def test_what_is_measured_is_what_a_replay_takes() -> None:
    measured = replace(job("SGD", state=1), measured=measured_optimizers(job("SGD", state=1), CPU, rounds=2))
    for name, effect in measured.measured.items():
        written = {"implementation": "fused" if "fused" in name else "foreach"}
        assert OptimizerImplementation.model_validate(written)._effect(measured) == effect


@pytest.mark.parametrize(
    "names", [(), ("SGD", "AdamW"), ("LBFGS",), ("Mine",), ("lr_scheduler",), ("Optimizer",)]
)
def test_what_is_not_torchs_own_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match="cannot be measured"):
        measured_optimizers(job(*names), CPU)


@pytest.mark.usefixtures("cuda_build")
def test_a_build_for_cuda_without_a_gpu_measures_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch_private.compute_device() == CPU
    trace = written(JOB, tmp_path / "trace")
    assert run(["measure", "optimizer", str(trace)]) == 0
    assert "optimizer fused SGD: " in capsys.readouterr().out
    assert json.loads((trace / "measured.json").read_text())["device"] == "cpu"


def test_devices_are_asked_for_in_one_place() -> None:
    naming = [path for path in SOURCES.rglob("*.py") if "current_accelerator" in path.read_text()]
    assert [path.name for path in naming] == ["tensors.py"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("precision",), "Missing argument 'TRACE'"),
        (("precision", "nowhere"), "no command to measure"),
        (("precision", "nowhere", "--", "true"), "nowhere"),
        (("optimizer", "nowhere"), "nowhere"),
        (("optimizer", "nowhere", "--", "true"), "without a command"),
        (("--quick", "input", "trace", "--", "true"), "No such option"),
        (("recompute", "{trace}", "--", "true"), "no pass of this name can be measured"),
        (("input", "{trace}", "2", "--", "true"), "OPTION=VALUE"),
        (("input", "{trace}", "workers=0", "--", "true"), "greater than or equal to 1"),
        (("precision", "{trace}", "dtype=float16", "0", "--", "true"), "float16 needs the whole model"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(JOB, tmp_path / "trace") if "{trace}" in words else None
    assert run(["measure", *(word.format(trace=trace) for word in words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headway: ")
    assert problem in error
    assert error.count("\n") == 1


def test_options_have_defaults() -> None:
    trace = synthetic_trace()
    assert pass_of(trace, ["precision"]) == Precision(dtype="bfloat16")
    assert pass_of(trace, ["precision", "0", "1"]) == Precision(dtype="bfloat16", modules=("0", "1"))
    assert pass_of(trace, ["precision", "dtype=float16"]) == Precision(dtype="float16")
    assert pass_of(trace, ["input"]) == InputWorkers(workers=2)
    assert pass_of(trace, ["input", "workers=3", "prefetch=4"]) == InputWorkers(workers=3, prefetch=4)
    assert pass_of(trace, ["compile", "blocks.0"]) == Compile(modules=("blocks.0",))


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["measure", "--help"]) == 0
    assert "headway measure optimizer trace" in capsys.readouterr().out
