"""What is run and predicted: models, plans, and the ways in which a cluster differs from that of the base run."""

from __future__ import annotations

from dataclasses import dataclass

from headway.models.catalogue import MODELS
from headway.models.roofline import step_s
from headway.models.table import FLOAT_BYTES
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy

BASE_WORKERS = 4
COMPUTE_S = 0.9  # forward and backward of a paced step
ONE_WAY_SHARE = 0.35  # of that: what one way of communication takes at the base rate
MOST_BYTES = 8e6  # of a scaled model
LARGE_MODEL_BYTES = 200e6  # from here on buckets are of 25 MiB rather than 5, about twenty a model either way
TCP_SHARE = 0.956  # of a shaped link's rate that Gloo's payload gets
SLOW_RANK, SLOW_BY = 1, 1.5
SLOW_HOST, LINK_SHARE = "host1", 0.5
TENANT, TENANT_SHARE = ("host0", "host1"), 0.4  # of a link's rate


@dataclass(frozen=True)
class Subject:
    """A model and how it is imitated: sizes over ``shrink``, times times ``dilation``, and the base rate of links.

    ``cap_mb`` is the size of buckets where gradients are decoupled or pushed to servers, of the unscaled model.
    """

    model: str
    shrink: int
    dilation: float
    rate_mbit: float
    cap_mb: float

    @classmethod
    def of(cls, model: str) -> Subject:
        """Such that one way of communication takes ``ONE_WAY_SHARE`` of computation on ``BASE_WORKERS``."""
        table = MODELS[model]()
        size_bytes = table.parameter_count * FLOAT_BYTES
        shrink = 1
        while size_bytes / shrink > MOST_BYTES:
            shrink *= 2
        one_way_bytes = size_bytes / shrink * (BASE_WORKERS - 1) / BASE_WORKERS
        bytes_per_s = one_way_bytes / (ONE_WAY_SHARE * COMPUTE_S)
        return cls(
            model=model,
            shrink=shrink,
            dilation=COMPUTE_S / sum(step_s(table)),
            rate_mbit=round(bytes_per_s / TCP_SHARE * 8e-6, 1),
            cap_mb=5 if size_bytes < LARGE_MODEL_BYTES else 25,
        )


@dataclass(frozen=True)
class Lab:
    """A cluster as it differs from that of the base run. ``kind`` names the difference in tables."""

    kind: str = "homogeneous"
    workers: int = BASE_WORKERS
    rate: float = 1.0  # times the base rate
    compute: float = 1.0  # layers take so many times as long as in the base run
    slow_rank: bool = False
    slow_link: bool = False
    tenant: bool = False

    @property
    def name(self) -> str:
        said = [f"p{self.workers}", f"{self.rate:g}x"]
        said += [f"compute-{self.compute:g}x"] if self.compute != 1 else []
        said += [word for word in ("slow_rank", "slow_link", "tenant") if getattr(self, word)]
        return "-".join(said).replace("_", "-")


@dataclass(frozen=True)
class Effort:
    """How often a plan is trained, in turn with all others, and for how many timed steps each time."""

    rounds: int
    steps: int


FULL, QUICK = Effort(2, 4), Effort(1, 4)
CROWDED = "crowded"
PACED = ("resnet50", "densenet201", "bert-base", "vgg16")
BASE_PLAN = "ddp-25"
BASE_LAB = Lab()
LABS = {
    lab.name: lab
    for lab in (
        BASE_LAB,
        Lab(workers=2),
        Lab(CROWDED, workers=8),  # all hosts have two cores between them
        Lab("half pace", workers=8, rate=0.5, compute=2.0),  # the same, with time for the cores
        Lab(rate=0.5),
        Lab(rate=2.0),
        Lab("slow rank", slow_rank=True),
        Lab("slow link", slow_link=True),
        Lab("tenant", tenant=True),
    )
}


def plans_of(subject: Subject, lab: Lab) -> dict[str, Strategy]:
    """The plans that are run on ``lab``. Bucket sizes are of the unscaled model, in MiB."""

    def ddp(cap_mb: float) -> Strategy:
        return DistributedDataParallelStrategy(bucket_caps_mb=(cap_mb / subject.shrink,))

    cap_mb = subject.cap_mb / subject.shrink
    decoupled = DecoupledStrategy(bucket_cap_bytes=round(cap_mb * 2**20), channels=1)
    few: dict[str, Strategy] = {
        BASE_PLAN: ddp(25),
        "decoupled-parameters": decoupled,
        "decoupled-gradients": decoupled.model_copy(update={"gather": "gradients"}),
        "servers": ParameterServerStrategy(bucket_cap_mb=cap_mb, channels=1),
    }
    if lab != BASE_LAB:
        return few
    two = decoupled.model_copy(update={"channels": 2})
    small = decoupled.model_copy(update={"bucket_cap_bytes": round(cap_mb * 2**20 / 5)})
    return {
        **few, "ddp-2.5": ddp(2.5), "ddp-5": ddp(5), "ddp-100": ddp(100),
        "decoupled-parameters-2-channels": two, "decoupled-parameters-small": small,
    }  # fmt: skip
