"""What a few steps without communication teach: orders of use and readiness, and when each gradient is ready."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headway.bound import bound_of
from headway.cluster import Cluster, Host
from headway.graph.computation import Computation
from headway.graph.step_layout import StepProfile
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import GATHER_MODES
from headway.strategies.live.module_spec import model_spec
from paced_training.jobs import PacedJob
from paced_training.trainer import alone

_STEPS = 2


@dataclass(frozen=True)
class Learned:
    """The spec with its orders; when parameters are ready after backward's start, modules needed after forward's."""

    spec: ModelSpec
    ready_s: dict[str, float]
    needed_s: dict[str, float]

    def dependency_bound_s(self, forward_s: float, backward_s: float, bytes_per_s: float) -> float:
        """What no decoupled schedule of this step can beat on such links, however fine its buckets, of either form."""
        gbps = bytes_per_s * 8 / 1e9
        hosts = [
            Host(name=f"rank{r}", workers=1, up_gbps=gbps, down_gbps=gbps)
            for r in range(dist.get_world_size())
        ]
        profile = StepProfile(
            forward_ns=round(forward_s * 1e9),
            backward_ns=round(backward_s * 1e9),
            needs_ns={name: round(at_s * 1e9) for name, at_s in self.needed_s.items()},
            ready_ns={name: round(at_s * 1e9) for name, at_s in self.ready_s.items()},
        )
        cluster = Cluster(hosts=tuple(hosts), latency_us=0.0)
        job = Job((self.spec,), cluster.world_size, cluster, Computation({0: (profile.timeline(),)}))
        return min(bound_of(job, form).step_ns for form in GATHER_MODES) / 1e9


def learn(job: PacedJob) -> Learned:
    trainer = alone(job)
    names = {id(p): name for name, p in trainer.inner.named_parameters()}
    used: dict[str, float] = {}
    ready_at: dict[str, float] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, __, name=name: _once(used, name))
        for name, module in trainer.inner.named_modules()
        if list(module.parameters(recurse=False))
    ]

    def ready(parameter: torch.Tensor) -> None:
        ready_at[names[id(parameter)]] = time.perf_counter()

    handles += [p.register_post_accumulate_grad_hook(ready) for p in trainer.inner.parameters()]
    for _ in range(_STEPS):
        ready_at.clear()
        used.clear()
        taken = trainer.step()
    for handle in handles:
        handle.remove()
    order = sorted(ready_at, key=ready_at.__getitem__)
    start = ready_at[order[-1]] - taken.backward_s
    spec = model_spec(trainer.inner).model_copy(
        update={"forward_order": tuple(used), "ready_order": tuple(order)}
    )
    begun = min(used.values())
    return Learned(
        spec,
        {name: ready_at[name] - start for name in order},
        {name: at - begun for name, at in used.items()},
    )


def shared_from_rank_0(learned: Learned) -> Learned:
    """Rank 0's: every rank must decide the same."""
    box = [learned]
    dist.broadcast_object_list(box)
    return box[0]


def _once(used: dict[str, float], name: str) -> None:
    used.setdefault(name, time.perf_counter())
