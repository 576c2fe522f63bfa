"""The whole loop on this machine: record, diagnose, optimize, run what was planned, and compare."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway import files
from headway.cluster import Cluster
from headway.diagnosis.diagnosis import Diagnosis, diagnose
from headway.errors import HeadwayError
from headway.integrations.launch import injected_environment
from headway.lab import launch
from headway.lab.spec import LabSpec
from headway.optimization.candidate import Candidate
from headway.optimization.plan_writing import plan_of
from headway.optimization.result import SearchResult
from headway.optimization.search import search
from headway.recording.finish import finish_recording
from headway.replayer.replayer import Replayer
from headway.report.page import write_html
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.trace.folder import load_trace
from headway.trace.format import Trace

MODELS = {"gpt": "headway.demo.train_gpt", "digits": "headway.demo.train_digits"}
WARM_UP_STEPS = 5
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo trains, on how many workers over which link, and how long."""

    folder: Path
    model: str = "gpt"
    workers: int = 2
    rate: str = "200mbit"
    steps: int = 20
    rounds: int = 2
    mode: launch.Mode = "auto"


@dataclass(slots=True)
class PlanRuns:
    """One plan: what replay predicted, and what each run measured (mean step after warm-up)."""

    name: str
    strategy: Strategy
    plan_path: Path | None
    predicted_ms: float
    uncertainty_ms: float
    measured_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """The median over runs."""
        return statistics.median(self.measured_ms)

    @property
    def error(self) -> float:
        """Predicted against measured."""
        return self.predicted_ms / self.median_ms - 1


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything the demo found. ``runs`` are stock DDP, the best DDP and the best decoupled plan."""

    runs: tuple[PlanRuns, ...]
    chosen: PlanRuns
    found: SearchResult
    diagnosis: Diagnosis
    reproduction_error: float
    loss_difference: float
    cluster: Cluster
    notices: tuple[str, ...]
    report: Path

    @property
    def stock(self) -> PlanRuns:
        """Stock DDP with its default buckets."""
        return self.runs[0]


def run_demo(options: DemoOptions, progress: Progress) -> DemoResult:
    """Run the loop in a lab. ``progress`` is told each stage as it starts.

    Raises LabError where the lab cannot be built, HeadwayError where a stage of training fails.
    """
    lab = _Lab(options)
    progress("measuring the links")
    cluster_path = options.folder / "cluster.yaml"
    lab.run([sys.executable, "-P", "-m", "headway", "probe", "-o", str(cluster_path)])
    cluster = Cluster.load(cluster_path)
    progress("recording stock DDP")
    trace = lab.record(options.folder / "trace")
    progress("replaying every plan")
    diagnosis = diagnose(trace)
    replayer = Replayer(trace, cluster)
    found = search(replayer)
    runs = _plans_to_try(options.folder, replayer, found)
    for number in range(options.rounds):
        # Interleaved and turned round, so that a drift of the machine hits every plan alike.
        for one in runs if number % 2 == 0 else tuple(reversed(runs)):
            progress(f"training with {one.name}, run {number + 1} of {options.rounds}")
            lab.measure(one)
    chosen = next(one for one in runs if one.strategy == found.candidates[0].strategy)
    report = options.folder / "report.html"
    write_html(trace, diagnosis, report)
    return DemoResult(
        runs=runs,
        chosen=chosen,
        found=found,
        diagnosis=diagnosis,
        reproduction_error=found.replayed_ms / found.baseline_ms - 1,
        loss_difference=_largest_difference([one.losses for one in runs]),
        cluster=cluster,
        notices=tuple(dict.fromkeys(lab.notices)),
        report=report.absolute(),
    )


class _Lab:
    """Runs the demo's training script in a lab like the last one."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._spec = LabSpec.model_validate({"hosts": options.workers, "rate": options.rate})
        self.notices: list[str] = []
        self._said: list[str] = []

    def run(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._said.clear()
        status = launch.run(
            self._spec,
            command,
            env=environment if environment is not None else dict(os.environ),
            mode=self._options.mode,
            timeout_s=180,
            on_line=lambda rank, _stream, line: self._said.append(f"[rank {rank}] {line}"),
            on_notice=self.notices.append,
        )
        if status != 0:
            last = "; ".join(self._said[-3:])
            raise HeadwayError(f"{' '.join(command[:3])} ended with status {status} in the lab: {last[:500]}")

    def record(self, out: Path) -> Trace:
        staging = out.parent / f".{out.name}.recording"
        staging.mkdir(parents=True)
        options = {"folder": str(staging), "first_step": WARM_UP_STEPS, "stop_step": self._options.steps}
        self.run(self._command(), injected_environment(os.environ, record=json.dumps(options)))
        finish_recording(staging, out, self._options.workers, wait_s=0)
        return load_trace(out)

    def measure(self, one: PlanRuns) -> None:
        curve = self._options.folder / "curve.json"
        environment = dict(os.environ)
        if one.plan_path is not None:
            environment = injected_environment(os.environ, plan=str(one.plan_path))
        self.run([*self._command(), "--curve", str(curve)], environment)
        logged = json.loads(curve.read_text())
        curve.unlink()
        ends_s = logged["ends_s"][WARM_UP_STEPS - 1 :]
        one.measured_ms.append((ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) * 1e3)
        one.losses = logged["losses"]

    def _command(self) -> list[str]:
        batch = {"gpt": "32", "digits": "96"}[self._options.model]
        steps = str(self._options.steps)
        return [sys.executable, "-P", "-m", MODELS[self._options.model], "--steps", steps, "--batch", batch]


def _plans_to_try(folder: Path, replayer: Replayer, found: SearchResult) -> tuple[PlanRuns, ...]:
    stock = next(c for c in found.candidates if c.strategy == DistributedDataParallelStrategy())
    tuned = found.best(DistributedDataParallelStrategy.name)
    decoupled = found.best(DecoupledStrategy.name)
    runs = [PlanRuns("stock DDP", stock.strategy, None, stock.predicted_ms, stock.uncertainty_ms)]
    for candidate, name in ((tuned, "plan-ddp.yaml"), (decoupled, "plan-decoupled.yaml")):
        if candidate is not stock:
            runs.append(_planned(folder / name, candidate, replayer))
    best = found.candidates[0]
    plan_of(best, replayer).save(folder / "plan.yaml")
    return tuple(runs)


def _planned(path: Path, candidate: Candidate, replayer: Replayer) -> PlanRuns:
    plan_of(candidate, replayer).save(path)
    return PlanRuns(
        candidate.name, candidate.strategy, path, candidate.predicted_ms, candidate.uncertainty_ms
    )


def _largest_difference(curves: Sequence[Sequence[float]]) -> float:
    return float(np.max(np.ptp(np.array(curves), axis=0)))


def result_document(result: DemoResult) -> dict[str, object]:
    """The fields that ``headway demo --json`` prints."""
    return {
        "baseline_ms": result.stock.median_ms,
        "predicted_ms": result.chosen.predicted_ms,
        "measured_ms": result.chosen.median_ms,
        "speedup": result.stock.median_ms / result.chosen.median_ms,
        "plan": result.chosen.name,
        "report": str(result.report),
        "verdict": result.diagnosis.verdict,
        "reproduction_error": result.reproduction_error,
        "loss_difference": result.loss_difference,
        "bound_ms": result.found.bound_ms,
        "notices": list(result.notices),
        "runs": [
            {
                "name": one.name,
                "predicted_ms": one.predicted_ms,
                "uncertainty_ms": one.uncertainty_ms,
                "measured_ms": one.measured_ms,
                "error": one.error,
            }
            for one in result.runs
        ],
    }


def save_result(result: DemoResult, path: Path) -> None:
    """Keep the result next to the report."""
    files.write_text(path, files.dump_json(files.document("demo", **result_document(result))))
