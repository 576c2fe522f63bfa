"""Time to a loss: a case is run in the lab for several seeds, and what rank 0 wrote becomes rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import commit
from in_lab import run_in_lab

from decentralised_training import learning_rates
from decentralised_training.cases import SITUATIONS, SLOW_TIMES, Situation
from decentralised_training.methods import BASELINE, Method, method_named

TIMEOUT_S = 3000.0
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
QUICK_RUN_S = 6.0
LEAST_RUN_S = 20.0
SPARE_ITERATIONS = 1.15
"""So many times those that all-reduce needs are run: its looks, and its seeds, differ."""
SLOW_RANK = 3
METHODS: tuple[Method, ...] = tuple(
    method_named(name)
    for name in (
        "all-reduce", "parameter-server", "ad-psgd", "first-come", "inter-intra-punctual",
    )
)  # fmt: skip
QUICK_METHODS = ("all-reduce", "ad-psgd", "inter-intra-punctual")


@dataclass(frozen=True)
class LossCase:
    """A model that really learns, on ``hosts`` x ``workers_per_host`` workers whose iterations last ``step_s``.

    ``iterations_to_target`` is what synchronous training needs at its best learning rate, about. Gradients are computed
    and then the worker sleeps for the rest, as an accelerator would leave the CPU free. With ``tries_rates`` every
    method trains with every learning rate of its model, on one seed.
    """

    situation: Situation
    model: str
    target_loss: float
    rate_mbit: float
    step_s: float
    model_mib: float
    iterations_to_target: int
    hosts: int = 4
    workers_per_host: int = 2
    tries_rates: bool = False

    @property
    def name(self) -> str:
        return f"rates-{self.model}" if self.tries_rates else f"loss-{self.situation.name}-{self.model}"

    @property
    def seeds(self) -> tuple[int, ...]:
        return (learning_rates.SEED,) if self.tries_rates else SEEDS

    def rates(self, method: str) -> tuple[float, ...]:
        """The learning rates that ``method`` trains with, each from the start."""
        if self.tries_rates:
            return learning_rates.TRIED[self.model]
        return (learning_rates.best(self.model, method),)

    @property
    def world_size(self) -> int:
        return self.hosts * self.workers_per_host

    @property
    def run_s(self) -> float:
        """How long each method trains: all-reduce, which waits for the slowest, must reach the target."""
        slowest = max(self.situation.slow_times, SLOW_TIMES if self.situation.by_chance else 1.0)
        ring_mbit = 2 * (1 - 1 / self.world_size) * self.model_mib * 2**20 * 8 / 1e6
        step_s = max(slowest * self.step_s, ring_mbit / (self.rate_mbit * self.situation.slow_link))
        return max(LEAST_RUN_S, SPARE_ITERATIONS * self.iterations_to_target * step_s)


CASES = {
    case.name: case
    for model, target_loss, rate_mbit, step_s, model_mib, iterations in (
        ("digits", 0.15, 80.0, 0.08, 1.05, 30),
        ("gpt", 2.6, 80.0, 0.16, 0.52, 26),
    )
    for tries_rates, situation in (
        (True, SITUATIONS["homogeneous"]),
        *((False, each) for each in SITUATIONS.values()),
    )
    for case in (
        LossCase(
            situation, model, target_loss, rate_mbit, step_s, model_mib, iterations, tries_rates=tries_rates
        ),
    )
}
QUICK = "loss-slow5-digits"
Run = Mapping[str, Any]


def measure(case: LossCase, worker: Sequence[str], *, quick: bool) -> list[dict[str, Any]]:
    """The rows of a case; ``worker`` is the command of a rank, to which case, file and quickness are added."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "found.json"
        run_in_lab(
            case.name, case.situation.lab(case.hosts, case.workers_per_host, case.rate_mbit),
            [*worker, case.name, str(out), str(int(quick))], TIMEOUT_S,
        )  # fmt: skip
        found = json.loads(out.read_text())
    rows = rows_of_rates if case.tries_rates else rows_of
    return rows(case, found["runs"], found["shared"])


def rows_of(case: LossCase, runs: Sequence[Run], shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a method over all of its seeds. Losses are those of the mean of all models, on data held out.

    Losses at equal samples are where the method that came least far ended.
    """
    methods = list(dict.fromkeys(run["method"] for run in runs))
    least = min(run["samples"][-1] for run in runs)
    rows = []
    for name in methods:
        own = [run for run in runs if run["method"] == name]
        reached = [time_to(run, case.target_loss) for run in own]
        equal = [loss_at(run, least) for run in own]
        known = [each for each in reached if each is not None]
        rows.append(
            {
                "case": case.name, "method": name, "seeds": len(own), "target_loss": case.target_loss,
                "learning_rate": own[0]["learning_rate"],
                "time_to_loss_s": median(known) if len(known) == len(own) else "",
                "time_to_loss_spread": _spread(known), "reached": f"{len(known)} of {len(own)}",
                "loss_at_equal_samples": median(equal), "loss_spread": _spread(equal), "equal_samples": least,
                "final_loss": median(run["losses"][-1] for run in own),
                "iterations_per_s": mean(run["iterations"] / run["seconds"] for run in own),
                "spread_of_models": median(run["apart"] for run in own), **shared, "commit": commit(),
            }
        )  # fmt: skip
    _compare(rows)
    return rows


def rows_of_rates(case: LossCase, runs: Sequence[Run], shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a method and learning rate: the loss where the run that came least far ended."""
    least = min(run["samples"][-1] for run in runs)
    rows = [
        {
            "case": case.name, "method": run["method"], "learning_rate": run["learning_rate"],
            "loss_at_equal_samples": loss_at(run, least), "equal_samples": least, **shared, "commit": commit(),
        }
        for run in runs
    ]  # fmt: skip
    for row in rows:
        own = [each["loss_at_equal_samples"] for each in rows if each["method"] == row["method"]]
        row["is_best"] = row["loss_at_equal_samples"] == min(own)
    return rows


def time_to(run: Run, target_loss: float) -> float | None:
    """When the loss is first at most that and stays so at the next look, linearly between looks; None: never."""
    times, losses = run["times_s"], run["losses"]
    for number in range(1, len(losses)):
        if losses[number] <= target_loss and max(losses[number : number + 2]) <= target_loss:
            before, after = losses[number - 1], losses[number]
            share = (before - target_loss) / (before - after) if before > target_loss else 0.0
            return float(times[number - 1] + share * (times[number] - times[number - 1]))
    return None


def loss_at(run: Run, samples: float) -> float:
    """The loss after so many samples of all workers together, linearly between looks."""
    import numpy as np

    return float(np.interp(samples, run["samples"], run["losses"]))


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else ""


def _compare(rows: list[dict[str, Any]]) -> None:
    """Against all-reduce: how much sooner, and whether losses at equal samples lie within its seeds' spread."""
    base = next((row for row in rows if row["method"] == BASELINE), None)
    if base is None:
        return
    low, high = (float(each) for each in base["loss_spread"].split(" to "))
    for row in rows:
        if base["time_to_loss_s"] and row["time_to_loss_s"]:
            row["sooner_than_all-reduce"] = base["time_to_loss_s"] / row["time_to_loss_s"]
        own_low, own_high = (float(each) for each in row["loss_spread"].split(" to "))
        row["within_spread"] = "yes" if own_low <= high and own_high >= low else "no"
