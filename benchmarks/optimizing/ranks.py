"""The ranks of a case: in one job the default is recorded and links are probed, in the next everything is measured."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paced_training.measuring import Measured, measure, slowest_of_ranks
from paced_training.threshold_search import share_over
from paced_training.tuning import steps_of_trial_ms, trial_s

import headway
from headway import files
from headway.cluster import Cluster
from headway.measuring.probe import probe_cluster
from headway.network.collective_costs import Effort as ProbeEffort
from headway.network.collective_costs import fitted, timings_of
from headway.optimization.measured import LEAST_STEPS, run_rounds, winner
from headway.plan import Plan
from optimizing.cases import CASES, DEFAULT, MEASURED, STOCK, WARM_STEPS, DataParallelCase, Effort
from optimizing.replicas import Replicas
from optimizing.stages import Stages
from optimizing.stock_search import StockSearch

TRACE, PROBED, RECORDED, GIVEN, FOUND = "trace", "probed.yaml", "recorded.json", "given.json", "found.json"
SWITCH_INTERVAL_S = 1e-4
FINALISTS = 3
MOST_THAT_FIT = 8  # ranks that compute what their timings say
SHARE_OF_TRIALS = (
    0.7  # of the time for tuning, in which options are tried that were not; then the best are again
)


def work(phase: str, name: str, folder: Path, *, quick: bool) -> None:
    """Do one rank's part of a phase, "record" or "measure", of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    case = CASES[name]
    subject: Any = (
        Replicas(case, quick=quick) if isinstance(case, DataParallelCase) else Stages(case, quick=quick)
    )
    effort = case.effort(quick=quick)
    if phase == "record":
        _record(subject, effort, folder, busy_cores=case.computes)
    else:
        _measure(subject, effort, folder)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's groups wait for each other at length otherwise


def _record(subject: Any, effort: Effort, folder: Path, *, busy_cores: bool) -> None:
    begun = time.perf_counter()
    stop_step = WARM_STEPS + effort.recorded
    with headway.record(folder / TRACE, first_step=WARM_STEPS, stop_step=stop_step):
        trained = subject.default()
        trained.restart()
        for _ in range(stop_step):
            trained.step()
    recorded = time.perf_counter()
    cluster = _probed(effort.probe, busy_cores=busy_cores)
    if cluster is not None:
        cluster.save(folder / PROBED)
        took = {"record_s": recorded - begun, "probe_s": time.perf_counter() - recorded}
        files.write_text(folder / RECORDED, files.dump_json(took))


def _probed(effort: ProbeEffort, *, busy_cores: bool) -> Cluster | None:
    """The cluster as it is measured; on other ranks than 0 it may be None."""
    if dist.get_world_size() <= MOST_THAT_FIT:
        return probe_cluster(busy_cores=busy_cores, effort=effort)
    # All ranks would compute the same costs, on cores that they share.
    links = probe_cluster(busy_cores=busy_cores, effort=replace(effort, candidates=()))
    timings = timings_of(links, busy_cores=busy_cores, effort=effort)
    return fitted(links, timings, effort) if dist.get_rank() == 0 else None


def _measure(subject: Any, effort: Effort, folder: Path) -> None:
    given = json.loads((folder / GIVEN).read_text())
    decided, deciding_s = _decided(subject, effort, given["contenders"], given["kept"])
    search, took_s = _tuned(subject, effort, given["caps_mb"], given["budget_s"] + deciding_s)
    (best,) = search.finalists(1)
    methods: dict[str, Measured] = {DEFAULT: subject.default(), STOCK: subject.stock(best)}
    plans = given["plans"]
    if decided is not None and given["contenders"][decided] not in plans.values():
        plans = {**plans, MEASURED: given["contenders"][decided]}
    for name, path in plans.items():
        methods[name] = subject.planned(Plan.load(path))
    for each in methods.values():
        for _ in range(2):  # lazy set-up, such as DDP's order of readiness, before anything is timed
            each.step()
        each.finish()
    trained = list(methods.values())
    samples = [
        asdict(slowest_of_ranks(each))
        for each in measure(trained, rounds=effort.rounds, warm=effort.warm, steps=effort.steps)
    ]
    found = {
        "samples": dict(zip(methods, samples, strict=True)),
        "disagreements": dict(zip(methods, subject.disagreements(trained), strict=True)),
        "stock": {"tuning_s": took_s, "trials": search.trials, "option": _document(best),
                  "tried_ms": _tried_ms(search)},
        "decided": {"number": decided, "deciding_s": deciding_s},
    }  # fmt: skip
    for each in trained:
        each.close()
    if dist.get_rank() == 0:
        files.write_text(folder / FOUND, files.dump_json(found))


def _decided(subject: Any, effort: Effort, paths: Sequence[str], kept: int) -> tuple[int | None, float]:
    """Which plan short runs decide for, as ``headway optimize --measure`` does; and what they took."""
    if not paths:
        return None, 0.0
    begun, step_ms = time.perf_counter(), 1e3  # of all ranks, which have to ask for as many steps

    def run(number: int, steps: int) -> Sequence[float]:
        count = max(1, steps * effort.trial_steps // LEAST_STEPS)
        plan = Plan.load(paths[number])
        return steps_of_trial_ms(lambda: subject.planned(plan), effort.trial_warm, count)

    so_far = run_rounds(len(paths), range(kept), run, step_ms)
    return winner(so_far, range(kept), range(len(paths))), share_over()(time.perf_counter() - begun)


def _tuned(
    subject: Any, effort: Effort, given: Sequence[Sequence[float]], budget_s: float
) -> tuple[StockSearch[Any], float]:
    """Trials for ``budget_s``, or longer until all that the search begins with has been tried; and what they took."""
    begun = time.perf_counter()
    search: StockSearch[Any] = subject.search(given)
    share = share_over()

    def spent_s() -> float:
        return share(time.perf_counter() - begun)

    def tried(option: Any) -> None:
        search.tell(option, trial_s(lambda: subject.stock(option), effort.trial_warm, effort.trial_steps))

    while (not search.took_first or spent_s() < SHARE_OF_TRIALS * budget_s) and (
        option := search.ask()
    ) is not None:
        tried(option)
    while spent_s() < budget_s:
        for each in search.finalists(FINALISTS):
            tried(each)
    return search, spent_s()


def _tried_ms(search: StockSearch[Any]) -> dict[str, list[float]]:
    return {_said(each): [round(1e3 * one, 1) for one in all_s] for each, all_s in search.tried_s.items()}


def _document(option: Any) -> Any:
    return option if isinstance(option, str) else asdict(option)


def _said(option: Any) -> str:
    return option if isinstance(option, str) else str(option.describe())
