"""Running one case over two lab hosts: recorded, measured as its users measure, predicted, run with and without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import order_of
from job_shapes.measuring import headway
from job_shapes.running import step_ms

from headway.errors import LaunchError
from headway.lab import launch
from headway.lab.spec import parse_spec
from headway.measuring.passes import measured_effects
from headway.passes.measured import MeasuredPass
from headway.passes.optimizer import OptimizerImplementation
from headway.plan import Plan
from headway.replayer.measured_effects import save_effects
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.trace.folder import load_trace
from measured_passes.catalogue import Case

RATE = "10gbit"
FIRST = 8  # step that is recorded: torch compiles in those before
TIMEOUT_S = 300.0
OURS = (sys.executable, "-m", "headway")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PLANNED, AS_IT_IS = "planned", "as it is"


def case_of(case: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """What replay predicts of ``case`` with its pass, and the steps of its runs in ms, by whether they were planned."""
    script = (sys.executable, str(Path(__file__).parent / "train.py"), case.kind, str(FIRST + case.steps + 2))
    base, plan = folder / "base", folder / "plan.yaml"
    _record(base, script, case.steps, measuring=True)
    trace = load_trace(base)
    passes = {"passes": (case.changed,), "changes_training": case.changed.changes_training}
    strategy = DistributedDataParallelStrategy()
    Plan.data_parallel(strategy, trace.world_size, trace.model).model_copy(update=passes).save(plan)
    _measure(case, base, script)
    answer, why = headway("replay", str(base), "--plan", str(plan))
    if not answer:
        raise RuntimeError(f"{case.name}: {why}")
    methods = {AS_IT_IS: script, PLANNED: (*OURS, "run", "--plan", str(plan), "--", *script)}
    taken_ms: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(rounds):
        for name in (names[each] for each in order_of(number, len(names))):
            out = folder / f"{name.replace(' ', '-')}-{number}"
            _record(out, methods[name], case.steps, measuring=False)
            taken_ms[name].append(step_ms(load_trace(out)))
    return {"answer": answer, "taken_ms": taken_ms}


def _measure(case: Case, base: Path, script: Sequence[str]) -> None:
    """Measure like ``headway measure``, with runs in the lab."""
    if isinstance(case.changed, MeasuredPass):
        trace = load_trace(base)
        save_effects(trace, measured_effects(trace, case.changed, script, _run), "cpu")
    elif isinstance(case.changed, OptimizerImplementation):
        command = (sys.executable, "-m", "headway", "measure", "optimizer", str(base))
        subprocess.run(command, check=True, env={**os.environ, **ONE_THREAD}, stdout=sys.stderr)


def _record(out: Path, command: Sequence[str], steps: int, *, measuring: bool) -> None:
    also = () if measuring else ("--no-measuring",)
    status = _run(
        (*OURS, "record", *also, "-o", str(out), "--steps", f"{FIRST}:{FIRST + steps}", "--", *command)
    )
    if status:
        raise LaunchError("a run failed", got=f"status {status}", expected="0")


def _run(command: Sequence[str]) -> int:
    lines: list[str] = []
    status = launch.run(
        parse_spec({"hosts": 2, "rate": RATE}), command,
        env={**os.environ, **ONE_THREAD}, timeout_s=TIMEOUT_S,
        on_line=lambda _rank, _stream, line: lines.append(line), on_notice=lines.append,
    )  # fmt: skip
    if status:
        print("\n".join(lines[-20:]), file=sys.stderr)
    return status
