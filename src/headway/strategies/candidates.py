"""Candidates: what strategies say is worth a measurement while a job trains, given what its steps have taught."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from headway.cluster import Cluster
from headway.graph.computation import Computation
from headway.graph.step_layout import StepProfile
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule, GatherMode
from headway.strategies.base import Strategy
from headway.strategies.registry import NamedStrategy

IN_FORCE, OTHER_FORM = "in force", "other form"
"""Names of candidates: of what does the steps, and of what is tried only where as many channels prove to be best."""


class TuningEndedError(Exception):
    """Tuning cannot go on, on any rank; the message says why."""


class Candidate(BaseModel):
    """A strategy, a decoupled one with its buckets spelled out, and the step predicted of it if anything did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    strategy: NamedStrategy
    predicted_ms: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @property
    def is_stock(self) -> bool:
        """Whether it is stock DDP, with all-reduces of its own."""
        return self.strategy.name == "ddp"


@dataclass(frozen=True, slots=True)
class Learned:
    """What the steps before taught: their profile, and a share of the cluster's costs.

    The profile is as it was seen: slowed down by the collectives in flight, where the cluster says that they do so.
    """

    profile: StepProfile
    cluster: Cluster

    def job(self, model: ModelSpec) -> Job:
        """The job that was watched, which trains ``model``."""
        steps = Computation({0: (self.profile.timeline(),)})
        return Job((model,), self.cluster.world_size, self.cluster, steps)


@dataclass(frozen=True)
class Question:
    """What is to be tuned, the same on every rank. ``forms`` are the gathers that may be proposed.

    ``in_force`` is the decoupled schedule in force, or the last one that was where ``on_stock_ddp`` says what stock DDP
    does. ``stock`` is None where stock DDP would not train this script as the decoupled all-reduce does;
    ``script_stock`` has the script's own buckets, where those in force are others. ``may_serve`` says whether servers
    could carry its gradients.
    """

    model: ModelSpec
    in_force: BucketSchedule
    forms: tuple[GatherMode, ...]
    channels: int
    learned: Learned | None
    stock: Strategy | None = None
    on_stock_ddp: Strategy | None = None
    script_stock: Strategy | None = None
    may_serve: bool = False
