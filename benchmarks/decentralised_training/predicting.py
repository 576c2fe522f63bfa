"""What simulations say of methods before they run: on the probed cluster, with the paced model's own times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decentralised_training.cases import FACTORS, Situation
from decentralised_training.methods import METHODS, REFERENCE, is_partial, method_named
from headway.cluster import Cluster
from headway.graph.computation import Computation
from headway.graph.step_profile import StepProfile
from headway.graph.timeline import Part, Timeline
from headway.job import Job
from headway.model import ModelSpec
from headway.replayer.simulate import simulate
from headway.strategies.base import Strategy
from headway.strategies.horizon import Outcome
from headway.strategies.registry import plugin_named

SPREAD_ROOM = 1.02  # of simulated spreads, what chance is taken to make of equal ones


@dataclass(frozen=True)
class Predicted:
    """Iterations of all ranks a second; of ranks that go by themselves also how they wait, and how they mix."""

    iterations_per_s: float
    standing_ms: float | None = None
    spread: float | None = None
    sizes: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Profile:
    """What a rank computes in an iteration (seconds), and of what model."""

    spec: ModelSpec
    forward_s: float
    backward_s: float
    optimizer_s: float
    ready_s: Mapping[str, float]
    needed_s: Mapping[str, float]

    @classmethod
    def of(cls, learned: Mapping[str, Any]) -> Profile:
        """What rank 0 wrote down."""
        forward_s, backward_s = learned["passes_s"]
        return cls(
            ModelSpec.model_validate(learned["spec"]), forward_s, backward_s, learned["optimizer_s"],
            learned["ready_s"], learned["needed_s"],
        )  # fmt: skip

    def timeline(self, rank: int, step: int, factor: float = 1.0) -> Timeline:
        """An iteration whose passes take ``factor`` times as long."""
        profile = StepProfile(
            forward_ns=round(self.forward_s * 1e9),
            backward_ns=round(self.backward_s * 1e9),
            needs_ns={name: min(round(self.forward_s * 1e9), round(at * 1e9)) for name, at in self.needed_s.items()},
            ready_ns={name: min(round(self.backward_s * 1e9), round(at * 1e9)) for name, at in self.ready_s.items()},
            optimizer_ns=round(self.optimizer_s * 1e9),
        )  # fmt: skip
        whole = profile.timeline(rank, step)
        items = tuple(
            each._replace(duration_ns=round(each.duration_ns * factor))
            if each.kind in (Part.FORWARD, Part.BACKWARD)
            else each
            for each in whole.items
        )
        return Timeline(rank, step, items)


def job_of(profile: Profile, situation: Situation, cluster: Cluster, slow_rank: int) -> Job:
    """The job in its situation."""
    world_size = cluster.world_size
    if situation.by_chance:
        timelines = {
            rank: tuple(profile.timeline(rank, step, situation.factor(rank, step)) for step in range(FACTORS))
            for rank in range(world_size)
        }
    elif situation.slow_times != 1:
        timelines = {
            rank: (profile.timeline(rank, 0, situation.factor(rank, 0, slow_rank)),)
            for rank in range(world_size)
        }
    else:
        timelines = {0: (profile.timeline(0, 0),)}
    return Job((profile.spec,), world_size, cluster, Computation(timelines, warm_up_steps=3))


def predicted(job: Job, strategy: Strategy) -> Predicted:
    """The throughput of one method."""
    if not is_partial(strategy):
        return Predicted(job.world_size / simulate(job, strategy).step_ms * 1e3)
    outcome: Outcome | None = plugin_named(strategy.name).over_a_horizon(job, strategy)
    assert outcome is not None
    return Predicted(outcome.total_per_s, outcome.standing_ms, outcome.mean_spread, outcome.sizes)


def choice(found: Mapping[str, Predicted]) -> str:
    """What ``headway`` is: predicted to be the fastest of those whose models stay as close as AD-PSGD's do."""
    reference = found[REFERENCE].spread
    able = [
        name for name, each in found.items()
        if method_named(name).is_choice and each.spread is not None
        and (reference is None or each.spread <= reference * SPREAD_ROOM)
    ] or [method.name for method in METHODS if method.is_choice and method.name in found]  # fmt: skip
    return max(able, key=lambda name: found[name].iterations_per_s)
