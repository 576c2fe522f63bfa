"""The optimizer against the best that stock tools can do: plans found from one recording, predicted and measured live.

    python benchmarks/optimizer.py [--quick] [--only CASE] [--json FILE]

In a first job of a case stock training is recorded and its links are probed. From that alone the search that users get
finds a plan, and every plan of a small space is replayed. In a second job a search among stock settings takes as long
as all that has taken, and all methods are measured, interleaved. A case takes up to ten minutes, and is kept as
soon as it is done. Where HEADWAY_OPTIMIZER_FOLDER names a folder, recordings are kept there, and used again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import keep_case, parse_arguments, report
from in_lab import run_in_lab
from optimizing.cases import (
    CASES,
    DEFAULT,
    EXHAUSTIVE,
    HEADWAY,
    MEASURED,
    QUICK_CASES,
    STOCK,
    Case,
    DataParallelCase,
)
from optimizing.rows import page, rows_of

from headway import files

WORKER = "--worker"
TIMEOUT_S = 1500.0
WORDS = (
    "Median over interleaved rounds of the slowest rank's mean step (`interval`: bootstrap over rounds, 95 %); all "
    "methods in the same processes. `default` is stock training as a user gets it: DDP with its default buckets "
    "(scaled as the model is), or torch's 1F1B. `stock-tuned` is the best of stock settings by trials: DDP's caps for "
    "all buckets or for each, views or not, static graph or not, beginning with usual caps and with the buckets of "
    "the plan (as `headway settings` says them), of the best DDP that was replayed and of the best of the space; of "
    "the pipeline, torch's schedules and its own runtime of schedules with every order. Trials take as long as "
    "recording, probing and our search took together, or longer until the first options have been tried (`search_s`), "
    "and the best three are tried again in the last third. `headway` is the plan that `headway.optimization.search` "
    "finds from one recording of the default; `search_s` is loading, replaying and searching, without the recording "
    "and the probe (`recorded_s`). `headway-measured` is what short runs decide for among four of the search's plans "
    "and the recorded one, as `headway optimize --measure 4` does (in the job that measures, with runs of a fifth of "
    "its steps); its `search_s` includes them, and stock settings are tried for as much longer. `exhaustive` is the "
    "best of a small space, each plan of which is replayed: all "
    "divisions of a model's parameters, as `runs` of about as many bytes in the order of readiness, into buckets of "
    "whole runs, as DDP and decoupled in both forms, on one channel or two, with gathers of gradients as early as "
    "each of the planner's thresholds has them (and hierarchical where hosts have several workers); of the pipeline, "
    "groups of every size, with as many receive buffers or twice as many, and the other orders. `predicted_ms` and "
    "`uncertainty_ms` are what a user is told, of the default the recorded step; `replayed_ms` is its replay. "
    "`replays` are those of either search (of stock settings: trials). `bound_ms` is what no plan can beat as the "
    "search says it. `over_stock` is against the better of default and tuned. `busy_cores` is what anybody used of "
    "two cores. Paced rows: parameters, gradients and messages are real, layers are asleep for modelled times, and "
    "hosts share the cores; sizes are scaled (`size_scale`), and c / compute is that of 64 GPUs on the network "
    "(benchmarks/data_parallel.py). Of the nine jobs that were asked for, the heterogeneous cluster is what the fifth "
    "paced model trains on: links of 1, 1, 0.7 and 0.4 of a rate. `disagreement` is that of parameters with the "
    "default's after as many steps."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    chosen = QUICK_CASES if arguments.quick else tuple(CASES)
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else chosen:
        own = _of_case(CASES[name], quick=arguments.quick)
        if not arguments.quick:
            keep_case("optimizer", own, list(CASES), WORDS, page)
        rows += own
    report("optimizer", rows, arguments, WORDS, page)


def _of_case(case: Case, *, quick: bool) -> list[dict[str, Any]]:
    from optimizing.ranks import FOUND, GIVEN, RECORDED
    from optimizing.searching import Recording

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(os.environ.get("HEADWAY_OPTIMIZER_FOLDER", temporary)) / (case.name + "-quick" * quick)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / RECORDED).exists():
            _run("record", case, folder, quick=quick)
        effort = case.effort(quick=quick)
        recorded = json.loads((folder / RECORDED).read_text())
        _say(
            case,
            f"recorded in {recorded['record_s']:.0f} s, probed in {recorded['probe_s']:.0f} s; searching",
        )
        recording = Recording(folder, effort.runs)
        plans = {HEADWAY: recording.headway, EXHAUSTIVE: recording.exhaustive}
        for method, each in plans.items():
            _say(case, f"{method}: {each.name}, {each.predicted_ms:.0f} ms, found in {each.search_s:.1f} s")
            each.plan.save(folder / f"{method}.yaml")
        budget_s = min(sum(recorded.values()) + recording.headway.search_s, effort.longest_tuning_s)
        contenders, kept = recording.contenders() if isinstance(case, DataParallelCase) else ([], 0)
        given = {
            "caps_mb": recording.stock_caps_mb(), "budget_s": budget_s, "kept": kept,
            "plans": {method: str(folder / f"{method}.yaml") for method in plans},
            "contenders": [
                str(folder / f"{HEADWAY}.yaml") if each.name == recording.headway.name
                else _saved(each, folder / f"contender-{number}.yaml")
                for number, each in enumerate(contenders)
            ],
        }  # fmt: skip
        files.write_text(folder / GIVEN, files.dump_json(given))
        _run("measure", case, folder, quick=quick)
        found = json.loads((folder / FOUND).read_text())
        decided = found["decided"]["number"]
        # Where runs decided for the plan that was predicted to be the best, that was not measured twice.
        if decided is not None and MEASURED not in found["samples"]:
            for what in ("samples", "disagreements"):
                found[what][MEASURED] = found[what][HEADWAY]
        return _rows(
            case, recording, recorded, found, None if decided is None else contenders[decided], quick=quick
        )


def _saved(sought: Any, path: Path) -> str:
    sought.plan.save(path)
    return str(path)


def _run(phase: str, case: Case, folder: Path, *, quick: bool) -> None:
    _say(case, phase)
    command = [sys.executable, __file__, WORKER, phase, case.name, str(int(quick)), str(folder)]
    run_in_lab(case.name, case.lab(quick=quick), command, TIMEOUT_S)


def _rows(
    case: Case,
    recording: Any,
    recorded: dict[str, float],
    found: dict[str, Any],
    decided: Any,
    *,
    quick: bool,
) -> list[dict[str, Any]]:
    option, stock = found["stock"]["option"], found["stock"]
    replayer = recording.replayer
    base = replayer.expect(replayer.base)
    known: dict[str, dict[str, Any]] = {
        DEFAULT: {
            "predicted_ms": base.step_ms, "uncertainty_ms": base.uncertainty_ms,
            "plan": replayer.recorded_strategy.describe(),
        },
        STOCK: {
            "plan": option if isinstance(option, str) else _options_said(option),
            "search_s": stock["tuning_s"], "replays": stock["trials"],
        },
    }  # fmt: skip
    if isinstance(case, DataParallelCase):
        predicted_ms, uncertainty_ms = recording.expected_ms(option["caps_mb"])
        known[STOCK] |= {"predicted_ms": predicted_ms, "uncertainty_ms": uncertainty_ms}
    for method, each in ((HEADWAY, recording.headway), (EXHAUSTIVE, recording.exhaustive)):
        known[method] = {
            "predicted_ms": each.predicted_ms, "uncertainty_ms": each.uncertainty_ms, "plan": each.name,
            "search_s": each.search_s, "replays": each.replays,
        }  # fmt: skip
    if decided is not None:
        known[MEASURED] = {
            "predicted_ms": decided.predicted_ms, "uncertainty_ms": decided.uncertainty_ms, "plan": decided.name,
            "search_s": recording.headway.search_s + found["decided"]["deciding_s"],
        }  # fmt: skip
    for method, value in found["disagreements"].items():
        known[method]["disagreement"] = f"{value:.0e}"
    shared = {
        "bound_ms": recording.found.bound_ms, "recorded_ms": replayer.recorded_step_ms,
        "replayed_ms": replayer.base.step_ms,
        "recorded_s": sum(recorded.values()), "space": recording.space,
        "runs": case.effort(quick=quick).runs, **case.described(quick=quick),
    }  # fmt: skip
    return rows_of(case.name, found["samples"], known, shared)


def _options_said(option: dict[str, Any]) -> str:
    from optimizing.stock_search import DdpOptions

    return "DDP, " + DdpOptions(**option).describe()


def _say(case: Case, what: str) -> None:
    print(f"{case.name}: {what} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    if WORKER in sys.argv:
        from optimizing.ranks import work

        work(sys.argv[2], sys.argv[3], Path(sys.argv[5]), quick=bool(int(sys.argv[4])))
    else:
        main()
