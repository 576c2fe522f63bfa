"""What simulations say of methods before they run: on the probed cluster, with the paced model's own times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from decentralised_training.cases import FACTORS, Situation
from decentralised_training.methods import METHODS, REFERENCE, method_named
from decentralised_training.rates import Found, throughput
from headway.cluster import Cluster
from headway.graph.computation import Computation, Part, Timeline
from headway.graph.step_layout import StepProfile
from headway.job import Job
from headway.model import ModelSpec
from headway.simulator.simulate import simulate
from headway.strategies.base import Strategy
from headway.strategies.horizon import Outcome
from headway.strategies.partial_all_reduce.horizon import Window, over_a_horizon
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy

SEEDS = 3
SHORTEST_NS = 8_000_000_000
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
    """What a rank computes in an iteration (seconds), and of what model.

    ``chance`` has for each rank how many times as long as the typical one its iterations took, without communication.
    """

    spec: ModelSpec
    forward_s: float
    backward_s: float
    optimizer_s: float
    ready_s: Mapping[str, float]
    needed_s: Mapping[str, float]
    chance: Sequence[Sequence[float]]

    @classmethod
    def of(cls, learned: Mapping[str, Any], alone_s: Sequence[Sequence[tuple[float, float]]]) -> Profile:
        """What rank 0 wrote down, and the passes of each rank's iterations alone."""
        forward_s, backward_s = (median(each) for each in zip(*alone_s[0], strict=True))
        lengths_s = [[sum(passes_s) for passes_s in own_s] for own_s in alone_s]
        return cls(
            ModelSpec.model_validate(learned["spec"]), forward_s, backward_s, learned["optimizer_s"],
            learned["ready_s"], learned["needed_s"],
            [[each_s / median(own_s) for each_s in own_s] for own_s in lengths_s],
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """How many iterations of a rank are known."""
        return len(self.chance[0])

    def timeline(self, rank: int, step: int, factor: float) -> Timeline:
        """An iteration whose passes take ``factor`` times as long, and what chance made of them besides."""
        factor *= self.chance[rank][step % self.steps]
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
    steps = FACTORS if situation.by_chance else profile.steps
    timelines = {
        rank: tuple(
            profile.timeline(rank, step, situation.factor(rank, step, slow_rank)) for step in range(steps)
        )
        for rank in range(cluster.world_size)
    }
    return Job((profile.spec,), cluster.world_size, cluster, Computation(timelines, warm_up_steps=3))


def predicted(job: Job, strategy: Strategy, block: Found) -> Predicted:
    """The throughput of one method, in blocks like ``block`` of rank 0.

    Blocks begin with nobody in a group and end before groups have gone through all that can happen to them over a slow
    link, so it is not the rate of a long run that is measured. What is simulated begins and ends as a block does, over
    several seeds.
    """
    if not isinstance(strategy, PartialAllReduceStrategy):
        return Predicted(job.world_size / simulate(job, strategy).step_ms * 1e3)
    outcomes = [_simulated(job, strategy, block, seed) for seed in range(SEEDS)]
    sizes: Counter[int] = Counter()
    for each in outcomes:
        sizes.update(each.sizes)
    return Predicted(
        mean(throughput(_blocks(each, block)) for each in outcomes),
        mean(each.standing_ms for each in outcomes), mean(each.mean_spread for each in outcomes), sizes,
    )  # fmt: skip


def _simulated(job: Job, strategy: PartialAllReduceStrategy, block: Found, seed: int) -> Outcome:
    if block["by_itself"]:
        return over_a_horizon(
            job, strategy, Window(round(block["warm_s"] * 1e9), round(block["until_s"] * 1e9), seed)
        )
    until_ns = SHORTEST_NS
    while True:  # as many iterations as the block has, on every rank
        outcome = over_a_horizon(job, strategy, Window(0, until_ns, seed))
        if min(map(len, outcome.finished_ns)) >= len(block["ends_s"]):
            return outcome
        until_ns *= 2


def _blocks(outcome: Outcome, block: Found) -> list[Found]:
    """What was simulated as ranks would have written it down."""
    most = None if block["by_itself"] else len(block["ends_s"])
    return [
        {**block, "begin_s": 0.0, "ends_s": [at_ns / 1e9 for at_ns in own[:most]]}
        for own in outcome.finished_ns
    ]


def choice(found: Mapping[str, Predicted]) -> str:
    """What ``headway`` is: predicted to be the fastest of those whose models stay as close as AD-PSGD's do."""
    reference = found[REFERENCE].spread
    able = [
        name for name, each in found.items()
        if method_named(name).is_choice and each.spread is not None
        and (reference is None or each.spread <= reference * SPREAD_ROOM)
    ] or [method.name for method in METHODS if method.is_choice and method.name in found]  # fmt: skip
    return max(able, key=lambda name: found[name].iterations_per_s)
