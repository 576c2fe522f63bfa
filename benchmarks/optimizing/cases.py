"""The eight jobs of benchmarks/optimizer.py, the labs that they run on, and how much is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paced_training.cases import PacedCase, RealCase
from pipeline_training.network_cases import CASES as NETWORK_CASES
from pipeline_training.network_cases import Model, NetworkCase
from probes import MANY_RANKS

from headway.lab.spec import LabSpec, parse_spec
from headway.network.collective_costs import SHORT, THOROUGH
from headway.network.collective_costs import Effort as ProbeEffort


@dataclass(frozen=True)
class Effort:
    """How much is measured. A trial is ``trial_warm`` steps and then ``trial_steps`` timed ones.

    ``runs`` is how many runs of parameters the stated space divides a model into. The search among stock settings may
    take as long as ours has taken, but no longer than ``longest_tuning_s``.
    """

    rounds: int
    warm: int
    steps: int
    recorded: int
    trial_warm: int
    trial_steps: int
    runs: int
    longest_tuning_s: float
    probe: ProbeEffort = THOROUGH


DEFAULT, STOCK, HEADWAY, MEASURED, EXHAUSTIVE = (
    "default", "stock-tuned", "headway", "headway-measured", "exhaustive",
)  # fmt: skip
WARM_STEPS = 3  # before steps are recorded
REAL_FACTOR = 5  # real steps are short and vary: so many times more of them
FULL = Effort(7, 1, 3, 8, 1, 2, 8, 240.0)
QUICK = Effort(5, 1, 1, 5, 1, 1, 5, 15.0, SHORT)


@dataclass(frozen=True)
class DataParallelCase:
    """Replicas of one model, on hosts whose links have ``link_shares`` of the model's rate, or all of it."""

    name: str
    model: PacedCase | RealCase
    workers_per_host: int = 1
    link_shares: tuple[float, ...] = ()

    @property
    def computes(self) -> bool:
        """Whether training takes the cores that communicate."""
        return isinstance(self.model, RealCase)

    def effort(self, *, quick: bool) -> Effort:
        """How much of this case is measured."""
        effort = QUICK if quick else FULL
        if self.link_shares:  # ranks are not alike: each is replayed
            return replace(effort, runs=effort.runs - 1)
        if self.workers_per_host > 1:  # the same, and there are more plans
            return replace(effort, rounds=5, runs=effort.runs - 3, probe=MANY_RANKS)
        if not self.computes:
            return effort
        more = {name: getattr(effort, name) * REAL_FACTOR for name in ("steps", "recorded", "trial_steps")}
        return replace(effort, **more)

    def lab(self, *, quick: bool) -> LabSpec:
        """Hosts in the order of ranks."""
        model = self.model
        rate_mbit = model.rate_mbit if isinstance(model, RealCase) else model.plan(quick=quick).rate_mbit
        shares = self.link_shares or (1.0,) * (model.world_size // self.workers_per_host)
        hosts = [
            {"name": f"host{index}", "rate": f"{rate_mbit * share:.3f}mbit"}
            for index, share in enumerate(shares)
        ]
        return parse_spec({"hosts": hosts, "workers_per_host": self.workers_per_host})

    def described(self, *, quick: bool) -> dict[str, Any]:
        """What is printed with its rows."""
        found: dict[str, Any] = {"paced": not self.computes, "workers": self.model.world_size}
        if isinstance(self.model, RealCase):
            return {**found, "rate_mbit": f"{self.model.rate_mbit:g}"}
        plan = self.model.plan(quick=quick)
        rates = [f"{plan.rate_mbit * share:g}" for share in self.link_shares or (1.0,)]
        return {
            **found,
            "rate_mbit": " ".join(rates),
            "c_per_compute": plan.ratio,
            "size_scale": f"1/{plan.shrink}",
        }


@dataclass(frozen=True)
class PipelineCase:
    """Stages on hosts of their own."""

    name: str
    network: NetworkCase
    computes = False

    def effort(self, *, quick: bool) -> Effort:
        """How much of this case is measured."""
        return QUICK if quick else FULL

    def at(self, *, quick: bool) -> NetworkCase:
        """The pipeline, of half the times and sizes where it is to be ``quick``."""
        model = self.network.model
        halved = Model(
            tuple(each / 2 for each in model.forwards_ms),
            tuple(each // 2 for each in model.boundary_bytes),
            model.words,
        )
        return replace(self.network, model=halved) if quick else self.network

    def lab(self, *, quick: bool) -> LabSpec:
        """A host a stage."""
        return parse_spec(self.at(quick=quick).lab)

    def described(self, *, quick: bool) -> dict[str, Any]:
        """What is printed with its rows."""
        del quick
        return {"paced": True, "workers": self.network.stages, "rate_mbit": f"{self.network.rate_mbit:g}"}


Case = DataParallelCase | PipelineCase
UNEQUAL_SHARES = (1.0, 1.0, 0.7, 0.4)
_PACED = [
    DataParallelCase(case.name, case)
    for case in (
        PacedCase("resnet50", "balanced", 4), PacedCase("densenet201", "10gbe", 4),
        PacedCase("bert-base", "balanced", 4), PacedCase("bert-large", "10gbe", 4),
    )
]  # fmt: skip
_ALL: list[Case] = [
    *_PACED,
    DataParallelCase("inception-v4-unequal-p4", PacedCase("inception-v4", "10gbe", 4), link_shares=UNEQUAL_SHARES),
    PipelineCase("gpt-pipeline", NETWORK_CASES["steady-gpt"]),
    DataParallelCase("resnet50-4x4", PacedCase("resnet50", "balanced", 16), workers_per_host=4),
    DataParallelCase("real-gpt-400mbit", RealCase("gpt", 400.0)),
]  # fmt: skip
CASES = {case.name: case for case in _ALL}
QUICK_CASES = ("resnet50-balanced-p4",)
