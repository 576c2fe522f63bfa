"""Headway's decoupled all-reduce, and how its options are chosen. The one place to put the automatic tuner in."""

from __future__ import annotations

from typing import Any

from headway.strategies.data_parallel.decoupled.lifecycle import release
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.decoupled.wrapper import DecoupledDataParallel
from paced_training.cases import Effort
from paced_training.jobs import Job, optimizer_of
from paced_training.learned import Learned
from paced_training.trainer import Memory, Trainer, live_storages
from paced_training.tuning import sweep


class Ours(Trainer):
    name = "headway"
    bound = "decoupled"

    def __init__(
        self, job: Job, learned: Learned, cap_mb: float, *, counted: bool = False, **options: Any
    ) -> None:
        """``counted`` counts memory during the first two steps, which then take long."""
        inner = job.make()
        self._counted = counted
        if counted:
            own = {p.untyped_storage().data_ptr() for p in inner.parameters()}
            self._others = set(live_storages()) - own
        strategy = DecoupledStrategy(bucket_cap_bytes=max(1, round(cap_mb * job.scale * 2**20)), **options)
        wrapped = DecoupledDataParallel(inner, schedule=strategy.decide(learned.spec))
        super().__init__(job, wrapped, inner, optimizer_of(inner.parameters()))
        self.decoupled = wrapped
        self._held: list[int] = []
        self.note = f"{len(wrapped.schedule.buckets)} buckets of {cap_mb:g} MiB scaled, {options}"

    def update(self) -> None:
        assert self.optimizer is not None
        if self._counted and len(self._held) < 2:
            live = live_storages()
            self._held.append(sum(size for address, size in live.items() if address not in self._others))
        self.optimizer.step()

    def finish(self) -> None:
        self.decoupled.flush()

    def memory(self) -> Memory:
        """As counted before the first two updates: a later look at gradients or state would fetch other ranks' shards.

        What the first update added is the optimizer's; the rest beside parameters is working memory.
        """
        before, after = self._held
        parameter_bytes = 4 * sum(p.numel() for p in self.inner.parameters())
        return Memory(parameter_bytes, before - parameter_bytes, after - before)

    def close(self) -> None:
        if self.decoupled.engine is not None:
            release(self.decoupled.engine)


FORMS: tuple[dict[str, Any], ...] = ({"gather": "parameters"}, {"gather": "gradients"})
"""Options tried with the best bucket size of the first."""


def ours(job: Job, learned: Learned, effort: Effort) -> tuple[Ours, dict[str, float]]:
    """The best of a sweep of bucket sizes, then of forms, tried while training."""
    cap_mb, tried = sweep(effort.caps, lambda cap: Ours(job, learned, cap, **FORMS[0]), effort)
    form, also = sweep(FORMS, lambda options: Ours(job, learned, cap_mb, **options), effort)
    return Ours(job, learned, cap_mb, counted=True, **form), tried | also
