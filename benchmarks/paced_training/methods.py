"""All methods of one case, each tuned where it has something to tune."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headway.scheduling import fusion
from paced_training import stock
from paced_training.byte_scheduler import ByteScheduler
from paced_training.cases import Effort
from paced_training.dear import Dear
from paced_training.jobs import PacedJob
from paced_training.learned import Learned
from paced_training.ours import ours
from paced_training.probing import AlphaBeta
from paced_training.trainer import Trainer, alone
from paced_training.tuning import bayesian, sweep

ALONE, DEFAULT, TUNED, PUBLISHED, OURS = "alone", "ddp", "ddp-tuned", "dear", "headway"


@dataclass
class Built:
    """Methods that work here, those that do not with the reason, and what tuning tried (milliseconds)."""

    trainers: dict[str, Trainer] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    tried: dict[str, dict[str, float]] = field(default_factory=dict)


def build(job: PacedJob, learned: Learned, cost: AlphaBeta, effort: Effort) -> Built:
    """Make and tune every method. One that raises is left out with its reason, on all ranks alike."""
    built = Built()

    def tuned_ddp() -> Trainer:
        options = [stock.DEFAULT_CAPS_MB, *((cap,) for cap in effort.caps)]
        caps_mb, built.tried[TUNED] = sweep(options, lambda caps: stock.ddp_capped(job, caps), effort)
        return stock.ddp_capped(job, caps_mb)

    def mg_wfbp() -> Trainer:
        ready_ns = {name: round(ready_s * 1e9) for name, ready_s in learned.ready_s.items()}
        groups = fusion.mg_wfbp(learned.spec, ready_ns, cost.alpha_s * 1e9, cost.beta_s * 1e9)
        return stock.merged(job, fusion.bucket_caps_mb(groups, learned.spec))

    def dear() -> Trainer:
        size_mb = learned.spec.size_bytes / job.scale / 2**20
        threshold_mb, built.tried["dear"] = bayesian(lambda mb: Dear(job, mb), size_mb, effort)
        return Dear(job, threshold_mb)

    def decoupled() -> Trainer:
        trainer, built.tried[OURS] = ours(job, effort)
        return trainer

    makers: dict[str, Callable[[], Trainer]] = {
        ALONE: lambda: alone(job),
        DEFAULT: lambda: stock.ddp_default(job),
        TUNED: tuned_ddp,
        "zero": lambda: stock.zero_redundancy(job),
        "fsdp2": lambda: stock.FullyShard(job, stock.DEFAULT_CAP_MB),
        "wfbp": lambda: stock.wfbp(job),
        "mg-wfbp": mg_wfbp,
        "bytescheduler": lambda: ByteScheduler(job),
        "dear": dear,
        OURS: decoupled,
    }
    for name, make in makers.items():
        try:
            trainer = make()
            for _ in range(2):  # lazy set-up, such as DDP's order of readiness, before anything is timed
                trainer.step()
            trainer.finish()
            built.trainers[name] = trainer
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError) as error:
            built.errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return built
