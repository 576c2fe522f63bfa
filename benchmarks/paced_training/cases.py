"""Cases: which model on which imitated network, and the scale, dilation and link rate that imitate it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from headway.models.catalogue import MODELS, PUBLISHED
from headway.models.roofline import step_s
from headway.models.table import FLOAT_BYTES, LayerTable

IMITATED_WORKERS = 64
TCP_SHARE = 0.956  # of a shaped link's rate that Gloo's payload gets (measured, field notes on collectives)
MOST_BYTES = 12e6  # of a scaled model: what eight ranks can move a step on two cores besides everything else
MOST_BYTES_PER_S = 60e6  # of one link, for the same reason
WANTED_STEP_S = {4: 1.0, 8: 1.4, 16: 2.4}
QUICK_STEP_S = {4: 0.5, 8: 0.5, 16: 1.2}


@dataclass(frozen=True)
class Network:
    """A network that is imitated: its name and the goodput that a ring of collectives gets of it.

    Without a goodput it is whatever network makes one way of communication as long as backward, where decoupling
    gains most.
    """

    name: str
    goodput_bytes_per_s: float | None
    words: str


NETWORKS = {
    "10gbe": Network("10gbe", 0.94 * 10e9 / 8, "10 Gb/s Ethernet, 0.94 of it goodput"),
    "100gib": Network("100gib", 0.90 * 100e9 / 8, "100 Gb/s InfiniBand, 0.90 of it goodput"),
    "balanced": Network("balanced", None, "one on which c = t_b"),
}


@dataclass(frozen=True)
class PacedCase:
    """A table on a network, imitated by ``world_size`` paced workers."""

    model: str
    network: str
    world_size: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.network}-p{self.world_size}"

    @property
    def table(self) -> LayerTable:
        return MODELS[self.model]()

    def imitated_ratio(self) -> float:
        """c / (t_f + t_b) of 64 GPUs: one way's volume at the network's goodput against modelled computation."""
        forward_s, backward_s = step_s(self.table)
        goodput = NETWORKS[self.network].goodput_bytes_per_s
        if goodput is None:
            return backward_s / (forward_s + backward_s)
        size_bytes = self.table.parameter_count * FLOAT_BYTES
        c_s = size_bytes * (IMITATED_WORKERS - 1) / IMITATED_WORKERS / goodput
        return c_s / (forward_s + backward_s)

    def plan(self, *, quick: bool) -> PacedPlan:
        """Dilation such that the bound of decoupled all-reduce is the step wanted; rate such that the ratio holds."""
        ratio = self.imitated_ratio()
        forward_s, backward_s = step_s(self.table)
        share = forward_s / (forward_s + backward_s)
        wanted_s = (QUICK_STEP_S if quick else WANTED_STEP_S)[self.world_size]
        compute_s = wanted_s / (max(share, ratio) + max(1 - share, ratio))
        others = (self.world_size - 1) / self.world_size
        bytes_in_time = MOST_BYTES_PER_S * ratio * compute_s / others
        size_bytes = self.table.parameter_count * FLOAT_BYTES
        shrink = 1
        while size_bytes / shrink > min(MOST_BYTES, bytes_in_time):
            shrink *= 2
        goodput = size_bytes / shrink * others / (ratio * compute_s)
        return PacedPlan(
            model=self.model,
            shrink=shrink,
            dilation=compute_s / (forward_s + backward_s),
            rate_mbit=round(goodput / TCP_SHARE * 8 / 1e6, 1),
            ratio=ratio,
        )


@dataclass(frozen=True)
class PacedPlan:
    """How a case is run; ``ratio`` is c / (t_f + t_b), the same as that of the system imitated."""

    model: str
    shrink: int
    dilation: float
    rate_mbit: float
    ratio: float


@dataclass(frozen=True)
class RealCase:
    """Two workers that compute on a core each: a model of the demo on links of one rate."""

    model: str
    rate_mbit: float
    world_size: int = 2

    @property
    def name(self) -> str:
        return f"real-{self.model}-{self.rate_mbit:g}mbit"


@dataclass(frozen=True)
class Effort:
    """How much is measured. A trial of a sweep is ``trial_warm`` steps and then ``trial_steps`` timed ones."""

    rounds: int
    warm: int
    steps: int
    trial_warm: int
    trial_steps: int
    bayesian_trials: int
    caps: tuple[float, ...]  # bucket sizes tried, in MiB of the unscaled model
    real_caps: tuple[float, ...]  # the same for the small models of the real cases
    real_factor: int  # real steps are short: so many times more of them

    def for_real(self) -> Effort:
        """The same effort for a real case."""
        return replace(self, steps=self.steps * self.real_factor, caps=self.real_caps)


FULL = Effort(3, 1, 3, 1, 2, 10, (2.5, 5, 10, 25, 50), (0.25, 0.5, 1, 2, 4), 5)
QUICK = Effort(2, 1, 1, 1, 1, 2, (5, 25), (0.5, 2), 2)
_PACED = [
    PacedCase(model, network, p) for model in PUBLISHED for network in ("10gbe", "100gib") for p in (4, 8)
]
_BALANCED = [PacedCase(model, "balanced", p) for model in ("resnet50", "bert-base") for p in (4, 8)]
_REAL = [RealCase("gpt", 400.0), RealCase("gpt", 2000.0), RealCase("digits", 400.0)]
_CASES: list[PacedCase | RealCase] = [*_PACED, *_BALANCED, *_REAL]
ALL = {case.name: case for case in _CASES}
QUICK_CASES = ("resnet50-balanced-p4", "real-gpt-400mbit")


def describe(case: PacedCase | RealCase, *, quick: bool) -> dict[str, object]:
    """What is printed with the numbers of ``case``."""
    if isinstance(case, RealCase):
        return {"paced": False, "rate_mbit": case.rate_mbit}
    return {"paced": True} | {k: v for k, v in asdict(case.plan(quick=quick)).items() if k != "model"}
