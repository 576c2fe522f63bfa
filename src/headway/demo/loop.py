"""Runs the demo: record, diagnose, optimize, run the plans, and compare."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway import files
from headway.cluster import Cluster
from headway.diagnosis.diagnosis import Diagnosis, diagnose
from headway.errors import HeadwayError, UserError, one_line
from headway.integrations.launch import injected_environment
from headway.lab import launch
from headway.lab.spec import LabSpec
from headway.optimization.candidate import Candidate
from headway.optimization.measured import Measured, Runs, compared, is_measurable, winner
from headway.optimization.result import SearchResult, plan_of
from headway.optimization.search import search
from headway.recording.finish import finish_recording
from headway.replayer.fidelity import is_reproduced
from headway.replayer.replayer import Replayer
from headway.report.page import write_html
from headway.trace.folder import load_trace
from headway.trace.format import Trace

MODELS = {"gpt": "headway.demo.train_gpt", "digits": "headway.demo.train_digits"}
WARM_UP_STEPS = 5
CONTENDERS = 2  # plans of other strategies that are run besides stock DDP
STOCK = 0  # its number among the plans that are run
RESULT, REPORT, PLAN = "demo.json", "report.html", "plan.yaml"
PLANS = ("plan-1.yaml", "plan-2.yaml")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo: the model, the lab (one worker per host), and the number of steps.

    ``batch_share`` scales the batches that workers train on. ``probes`` says that links are measured before the
    recording, which is more precise than right after it.
    """

    folder: Path
    lab: LabSpec
    model: str = "gpt"
    steps: int = 20
    batch_share: float = 1.0
    rounds: int = 2
    contenders: int = CONTENDERS
    probes: bool = True
    mode: launch.Mode = "auto"

    @classmethod
    def quick(cls, **options: object) -> DemoOptions:
        """Options for about two minutes: smaller batches, one contender, links measured after the recording."""
        shorter = {"steps": 14, "batch_share": 0.5, "contenders": 1, "probes": False}
        return cls(**{**options, **shorter})  # type: ignore[arg-type]

    @property
    def stages(self) -> int:
        """The maximum number of stages."""
        return 2 + self.probes + (1 + self.contenders) * self.rounds


@dataclass(slots=True)
class PlanRuns:
    """A plan that is run: the prediction, and the steps of each run after its warm-up, in ms.

    ``plan_path`` is None for stock DDP, which needs no plan.
    """

    candidate: Candidate
    plan_path: Path | None
    steps_ms: list[Sequence[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in tables."""
        return "stock DDP" if self.plan_path is None else self.candidate.short_name

    @property
    def measured(self) -> Measured:
        """The measurements of its runs, of which there is at least one."""
        return Measured.of(self.steps_ms)

    @property
    def median_ms(self) -> float:
        """The median over runs."""
        return statistics.median(self.measured.runs_ms)

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.candidate.predicted_ms / self.median_ms - 1

    def to_document(self) -> dict[str, object]:
        """The plan and its measurements as JSON data."""
        figures: dict[str, object] = {
            "name": self.name,
            "predicted_ms": self.candidate.predicted_ms,
            "uncertainty_ms": self.candidate.uncertainty_ms,
        }
        if self.steps_ms:
            measured = self.measured
            figures |= {
                "measured_ms": list(measured.runs_ms),
                "median_ms": self.median_ms,
                "spread_ms": measured.spread_ms,
                "error": self.error,
            }
        return figures


@dataclass(slots=True)
class DemoResult:
    """The results of the demo so far; the first of ``runs`` is stock DDP.

    ``chosen`` is one of them: stock DDP, unless another was faster by more than the noise between rounds.
    """

    folder: Path
    stage: str = ""
    runs: tuple[PlanRuns, ...] = ()
    chosen: PlanRuns | None = None
    search_result: SearchResult | None = None
    diagnosis: Diagnosis | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def stock(self) -> PlanRuns:
        """Stock DDP with its default buckets."""
        return self.runs[STOCK]

    @property
    def keeps_recorded(self) -> bool:
        """Whether the answer is to keep stock DDP."""
        return self.chosen is self.stock

    @property
    def report(self) -> Path:
        """The page about the recording."""
        return (self.folder / REPORT).absolute()

    @property
    def speedup(self) -> float:
        """How many times as fast as stock DDP the chosen plan was, in the same rounds."""
        assert self.chosen is not None
        return self.speedup_of(self.chosen)

    def speedup_of(self, run: PlanRuns) -> float:
        """How many times as fast as stock DDP a plan was, in the same rounds."""
        return 1 / self._beside_stock(run)

    @property
    def has_machine_changed(self) -> bool:
        """Whether stock DDP was measured at another speed than was recorded: predictions are of the recording."""
        return not is_reproduced(self.stock.error)

    @property
    def predicted_speedup(self) -> float:
        """How many times as fast as stock DDP the chosen plan was predicted to be."""
        assert self.chosen is not None
        return self.stock.candidate.predicted_ms / self.chosen.candidate.predicted_ms

    @property
    def loss_difference(self) -> float:
        """The largest difference of the losses of two plans in the same step."""
        return float(np.max(np.ptp(np.array([run.losses for run in self.runs if run.losses]), axis=0)))

    def rounds(self) -> list[Runs]:
        """The runs by round and number of the plan, as far as they were made."""
        count = max((len(run.steps_ms) for run in self.runs), default=0)
        return [
            {number: run.steps_ms[at] for number, run in enumerate(self.runs) if at < len(run.steps_ms)}
            for at in range(count)
        ]

    def _beside_stock(self, run: PlanRuns) -> float:
        return compared(self.rounds(), self.runs.index(run), STOCK).ratio

    def to_document(self) -> dict[str, object]:
        """The fields that ``headway demo --json`` prints, as far as they are known."""
        fields: dict[str, object] = {
            "complete": self.chosen is not None,
            "stage": self.stage,
            "notices": list(dict.fromkeys(self.notices)),
            "runs": [run.to_document() for run in self.runs],
        }
        if self.diagnosis is not None:
            fields |= {"verdict": self.diagnosis.verdict, "report": str(self.report)}
        if self.search_result is not None:
            fields |= {
                "reproduction_error": self.search_result.reproduction_error,
                "can_rank_plans": self.search_result.can_rank,
                "bound_ms": self.search_result.bound_ms,
            }
        if self.chosen is not None:
            fields |= {
                "baseline_ms": self.stock.median_ms,
                "predicted_ms": self.chosen.candidate.predicted_ms,
                "measured_ms": self.chosen.median_ms,
                "speedup": self.speedup,
                "predicted_speedup": self.predicted_speedup,
                "plan": self.chosen.name,
                "keeps_recorded": self.keeps_recorded,
                "loss_difference": self.loss_difference,
            }
        return fields

    def save(self) -> None:
        """Write the results so far into the demo's folder."""
        document = files.document("demo", **self.to_document())
        files.write_text(self.folder / RESULT, files.dump_json(document))


def run_demo(options: DemoOptions, progress: Progress) -> DemoResult:
    """Run the loop in a lab. ``progress`` is called with each stage as it starts.

    Results are written into the demo's folder as they come. Raises LabError if the lab cannot be built, and HeadwayError
    if a stage fails, naming the file with the results so far.
    """
    lab = _Lab(options)
    result = DemoResult(options.folder, notices=lab.notices)

    def begins(stage: str) -> None:
        result.stage = stage
        result.save()
        progress(stage)

    with _kept_when_failing(result):
        cluster = None
        if options.probes:
            begins("measuring the links")
            cluster_path = options.folder / "cluster.yaml"
            lab.run([sys.executable, "-P", "-m", "headway", "probe", "-o", str(cluster_path)])
            cluster = Cluster.load(cluster_path)
        begins("recording stock DDP" + " and measuring the links" * (not options.probes))
        trace = lab.record(options.folder / "trace", measure=not options.probes)
        result.diagnosis = diagnose(trace)
        write_html(trace, result.diagnosis, result.report)
        begins("replaying every plan")
        replayer = Replayer(trace, cluster)
        result.search_result = search(replayer)
        result.runs = _plans_to_run(options, replayer, result.search_result)
        for number in range(options.rounds):
            # Interleaved in alternating order, so that a drift of the machine affects all plans alike.
            for run in result.runs if number % 2 == 0 else reversed(result.runs):
                begins(f"training with {run.name}, run {number + 1} of {options.rounds}")
                lab.measure(run)
        every = range(len(result.runs))
        result.chosen = result.runs[winner(result.rounds(), (STOCK,), every)]
        plan_of(result.chosen.candidate, replayer).save(options.folder / PLAN)
        result.stage = "done"
        result.save()
    return result


@contextmanager
def _kept_when_failing(result: DemoResult) -> Iterator[None]:
    """If a stage fails, save the results so far, and raise an error that names the stage, the reason and the file."""
    try:
        yield
    except Exception as failure:
        result.save()
        if not result.runs and isinstance(failure, UserError):
            raise  # nothing was measured yet, and the options are at fault
        why = str(failure) if isinstance(failure, HeadwayError) else f"{type(failure).__name__}: {failure}"
        raise HeadwayError(
            f"the demo failed while {result.stage}: {one_line(why, limit=600)} Results so far are in "
            f"{result.folder / RESULT}"
        ) from failure


class _Lab:
    """Runs the demo's training script, each time in a new lab of the same kind."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._spec = options.lab
        self.notices: list[str] = []
        self._output: list[str] = []

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._output.clear()
        status = launch.run(
            self._spec,
            command,
            env=dict(os.environ if environment is None else environment),
            mode=self._options.mode,
            timeout_s=180,
            on_line=lambda rank, _stream, line: self._output.append(f"[rank {rank}] {line}"),
            on_notice=self.notices.append,
        )
        if status != 0:
            last = "; ".join(self._output[-3:])
            raise HeadwayError(f"{' '.join(command[:3])} ended with status {status} in the lab: {last[:500]}")

    def record(self, out: Path, *, measure: bool) -> Trace:
        staging = out.parent / f".{out.name}.recording"
        staging.mkdir(parents=True)
        options = {
            "folder": str(staging),
            "first_step": WARM_UP_STEPS,
            "stop_step": self._options.steps,
            "measure": measure,
        }
        command = self._command()
        self.run(command, injected_environment(os.environ, record=json.dumps(options)))
        finish_recording(staging, out, self._options.lab.world_size, wait_s=0, command=command)
        return load_trace(out)

    def measure(self, run: PlanRuns) -> None:
        curve = self._options.folder / "curve.json"
        environment = dict(os.environ)
        if run.plan_path is not None:
            environment = injected_environment(os.environ, plan=str(run.plan_path))
        self.run([*self._command(), "--curve", str(curve)], environment)
        logged = json.loads(curve.read_text())
        curve.unlink(missing_ok=True)
        run.steps_ms.append((np.diff(logged["ends_s"][WARM_UP_STEPS - 1 :]) * 1e3).tolist())
        run.losses = logged["losses"]

    def _command(self) -> list[str]:
        batch = str(round({"gpt": 32, "digits": 96}[self._options.model] * self._options.batch_share))
        steps = str(self._options.steps)
        return [sys.executable, "-P", "-m", MODELS[self._options.model], "--steps", steps, "--batch", batch]


def _plans_to_run(options: DemoOptions, replayer: Replayer, result: SearchResult) -> tuple[PlanRuns, ...]:
    """Stock DDP as recorded, and the best plans of each strategy (also stock DDP with other buckets).

    Only plans that the script can run as it is.
    """
    stock = result.recorded
    assert stock is not None, "there is no memory limit"
    best: dict[str, Candidate] = {}
    for candidate in result.candidates:
        if candidate.changed and is_measurable(candidate):
            best.setdefault(candidate.strategy.name, candidate)
    runs = [PlanRuns(stock, None)]
    for candidate, name in zip([*best.values()][: options.contenders], PLANS, strict=False):
        plan_of(candidate, replayer).save(options.folder / name)
        runs.append(PlanRuns(candidate, options.folder / name))
    return tuple(runs)
