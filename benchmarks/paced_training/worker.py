"""One rank of a case: probe, learn, tune, measure all methods in turn, and let rank 0 write what was found."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paced_training import cases
from paced_training.cases import Effort, PacedCase
from paced_training.jobs import PacedJob, paced_job, real_job
from paced_training.learned import Learned, learn, shared_from_rank_0
from paced_training.measuring import disagreement, measure, slowest_of_ranks
from paced_training.methods import ALONE, DEFAULT, Built, build
from paced_training.probing import all_reduce_cost, goodput_bytes_per_s

SWITCH_INTERVAL_S = 1e-4
"""Python's default of 5 ms would stall every method that has a thread of its own; the same for all."""


def work(case_name: str, quick: bool, out: Path) -> None:
    """Run the case named ``case_name`` as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    case, effort = cases.ALL[case_name], cases.QUICK if quick else cases.FULL
    if isinstance(case, PacedCase):
        job = paced_job(case.plan(quick=quick), dist.get_rank())
    else:
        job, effort = real_job(case.model, dist.get_rank()), effort.for_real()
    started = time.perf_counter()
    learned = shared_from_rank_0(learn(job))
    found = _measured(job, learned, effort)
    found["seconds"] = time.perf_counter() - started
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measured(job: PacedJob, learned: Learned, effort: Effort) -> dict[str, Any]:
    size_bytes = learned.spec.size_bytes
    one_way_bytes = round(size_bytes * (dist.get_world_size() - 1) / dist.get_world_size())
    goodputs = [goodput_bytes_per_s(one_way_bytes)]
    cost = all_reduce_cost(size_bytes // 4)
    built = build(job, learned, cost, effort)
    trainers = list(built.trainers.values())
    samples = measure(trainers, rounds=effort.rounds, warm=effort.warm, steps=effort.steps)
    goodputs.append(goodput_bytes_per_s(one_way_bytes))
    methods = _methods(built)
    for method, own in zip(methods, samples, strict=True):
        method["samples"] = asdict(slowest_of_ranks(own))
    alone = next(method["samples"] for method in methods if method["method"] == ALONE)
    dependency_s = learned.dependency_bound_s(
        statistics.median(alone["forward_s"]),
        statistics.median(alone["backward_s"]),
        max(goodputs),
    )
    for trainer in trainers:
        trainer.close()
    return {
        "size_bytes": size_bytes,
        "one_way_bytes": one_way_bytes,
        "goodput_bytes_per_s": goodputs,
        "dependency_bound_s": dependency_s,
        "all_reduce": asdict(cost),
        "methods": methods,
        "errors": built.errors,
        "tried_ms": built.tried,
    }


def _methods(built: Built) -> list[dict[str, Any]]:
    reference = built.trainers[DEFAULT].values()
    return [
        {
            "method": name,
            "bound": trainer.bound,
            "note": trainer.note,
            "steps": trainer.training.steps,
            "disagreement": disagreement(trainer.values(), reference),
            "memory": trainer.memory().row(),
            "tuning_steps_ms": list(trainer.tuning_steps_ms),
        }
        for name, trainer in built.trainers.items()
    ]
