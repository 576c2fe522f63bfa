from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.replayer.test_replayer import as_bucketed, job
from tests.synthetic import synthetic_trace

from headway.cli.main import run as main
from headway.errors import LaunchError
from headway.graph.computation import Part
from headway.job import MeasuredEffect
from headway.measuring.passes import effects_between
from headway.measuring.passes import measured_effects as measured_of_runs
from headway.model import PassMemory
from headway.passes.precision import Precision
from headway.plan import Plan
from headway.replayer.measured_effects import measured_effects, save_effects
from headway.trace.format import Trace

WHOLE = Precision(dtype="bfloat16")


def recorded(forward_ms: float, backward_ms: float) -> Trace:
    return as_bucketed(synthetic_trace(job(forward_ms=forward_ms, backward_ms=backward_ms, gbps=1.0)))


def test_effects_are_ratios_of_forward_and_of_backward() -> None:
    found = effects_between([recorded(20, 40)] * 2, [recorded(10, 80)] * 2, WHOLE)
    assert set(found) == {WHOLE.effect_name(Part.FORWARD), WHOLE.effect_name(Part.BACKWARD)}
    assert found[WHOLE.effect_name(Part.FORWARD)].factor == pytest.approx(0.5, rel=0.01)
    assert found[WHOLE.effect_name(Part.BACKWARD)].factor == pytest.approx(2, rel=0.01)


def test_the_command_runs_as_it_is_and_under_the_pass() -> None:
    trace, commands, plans = recorded(20, 40), [], []

    def run(command: Sequence[str]) -> int:
        commands.append(command)
        if "--plan" in command:
            plans.append(Plan.load(command[command.index("--plan") + 1]))
        return 3

    with pytest.raises(LaunchError, match="failed; got exit status 3"):
        measured_of_runs(trace, WHOLE, ("torchrun", "it.py"), run)
    (first,) = commands
    assert first[-3:] == ("--", "torchrun", "it.py")
    assert f"{trace.steps[0]}:{trace.steps[-1] + 1}" in first
    assert not plans


def test_memory_is_kept_with_the_trace(tmp_path: Path) -> None:
    trace = replace(recorded(20, 40), path=tmp_path)
    memory = PassMemory(forward_bytes=5, backward=(("weight", 7),))
    effects = {"a": MeasuredEffect(0.5, memory=memory), "b": MeasuredEffect(2, 3)}
    save_effects(trace, effects, "cpu")
    assert measured_effects(trace) == effects


@pytest.mark.parametrize("arguments", [[], ["trace"], ["--", "torchrun"], ["nowhere", "--", "torchrun"]])
def test_what_cannot_be_measured_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "precision", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
