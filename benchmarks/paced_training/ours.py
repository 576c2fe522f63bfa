"""Headway's decoupled all-reduce, tuned while it trains."""

from __future__ import annotations

import time

from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.adaptive.proposals import Tuned
from headway.strategies.adaptive.tuner import MEASURED_STEPS, tune
from headway.strategies.adaptive.wrapper import AdaptiveDataParallel
from headway.strategies.base import Strategy
from headway.strategies.decoupled.gather_parameters import GatherParameters
from headway.strategies.decoupled.policy import DecoupledStrategy
from paced_training.cases import Effort
from paced_training.jobs import PacedJob, optimizer_of
from paced_training.planned import end, settle
from paced_training.trainer import Memory, Trainer, live_storages

BEGIN_MB = 25.0  # the buckets that training begins with: stock DDP's
MOST_STEPS = 1000  # training goes on while rank 0 plans


class Ours(Trainer):
    name = "headway"
    bound = "decoupled"

    def __init__(self, job: PacedJob, strategy: Strategy, *, counted: bool = False) -> None:
        """``counted`` counts memory during the first step, which then takes long."""
        inner = job.make()
        self._counted = counted
        if counted:
            own = {p.untyped_storage().data_ptr() for p in inner.parameters()}
            # Kept until then, so that none of their addresses is used again.
            self._others = {a: storage for a, storage in live_storages().items() if a not in own}
        decided = strategy if isinstance(strategy, DecoupledStrategy) else DecoupledStrategy()
        wrapped = AdaptiveDataParallel(
            inner, strategy=AdaptiveStrategy(begin_as=decided, tune=False), bucket_cap_mb=BEGIN_MB * job.scale,
            gradient_as_bucket_view=True,  # as tuned DDP has it
        )  # fmt: skip
        if not isinstance(strategy, DecoupledStrategy):
            wrapped.use_stock_ddp(strategy)
        super().__init__(job, wrapped, inner, optimizer_of(inner.parameters()))
        self.decoupled = wrapped
        self._held_bytes = 0

    def update(self) -> None:
        assert self.optimizer is not None
        if self._counted:
            self._counted = False
            live = live_storages()
            self._held_bytes = sum(s.nbytes() for address, s in live.items() if address not in self._others)
            self._others.clear()
        self.optimizer.step()

    def finish(self) -> None:
        settle(self.decoupled)

    def optimizer_bytes(self) -> int:
        engine = self.decoupled.engine
        # A look into the optimizer's state would bring the other ranks' shares.
        return (
            engine.settlement.form.state_bytes
            if engine is not None and isinstance(engine.settlement.form, GatherParameters)
            else super().optimizer_bytes()
        )

    def memory(self) -> Memory:
        """As counted before the first update: a later look at gradients would bring other ranks' shards.

        The optimizer has no state then; what is held besides parameters is working memory.
        """
        parameter_bytes = 4 * sum(p.numel() for p in self.inner.parameters())
        return Memory(parameter_bytes, self._held_bytes - parameter_bytes, self.optimizer_bytes())

    def close(self) -> None:
        end(self.decoupled)


def tuned(job: PacedJob, effort: Effort) -> tuple[Tuned, list[float]]:
    """What a training run that is tuned comes to, and how long each of its steps took until then (ms)."""
    cap_bytes = max(1, round(BEGIN_MB * job.scale * 2**20))
    trainer = Ours(job, DecoupledStrategy(bucket_cap_bytes=cap_bytes))
    tune(trainer.decoupled, measured_steps=min(MEASURED_STEPS, effort.trial_steps + 1))
    trainer.training.restart()
    steps_ms: list[float] = []
    while trainer.decoupled.tuning is None and len(steps_ms) < MOST_STEPS:
        begun_s = time.perf_counter()
        trainer.step()
        steps_ms.append((time.perf_counter() - begun_s) * 1e3)
    found = trainer.decoupled.tuning
    assert found is not None
    trainer.finish()
    trainer.close()
    return found, steps_ms


def ours(job: PacedJob, effort: Effort) -> tuple[Ours, dict[str, float]]:
    """What a tuned run came to, from the start, so that every method has taken equally many steps; what was tried."""
    found, steps_ms = tuned(job, effort)
    trainer = Ours(job, found.strategy, counted=True)
    trainer.note, trainer.tuning_steps_ms = found.describe(), steps_ms
    tried = {
        f"{number} {candidate.name}, {candidate.strategy.describe()}": round(measured_ms, 1)
        for number, (candidate, measured_ms) in enumerate(
            zip(found.candidates, found.measured_ms, strict=True)
        )
    }
    return trainer, tried
