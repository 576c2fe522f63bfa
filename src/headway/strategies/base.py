"""``Strategy``: an immutable, validated value that decides what a job communicates, without side effects."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from headway.job import Job
from headway.permission import ASYNCHRONOUS, Permission
from headway.plugins import asking
from headway.scheduling.schedule import Schedule

DATA, PIPELINE = "data", "pipeline"
"""Dimensions of the device mesh: data-parallel replicas, and pipeline stages."""
DATA_INSIDE = "data inside hosts"
"""Inner part of a data dimension that is split around the pipeline dimension: the replicas on one host."""


SHORT_NAME = 60
SENT_AS = "sent as"  # introduces codecs in descriptions


def short_name(description: str) -> str:
    """Shorten a strategy's description to about ``SHORT_NAME`` characters; codecs are always kept."""
    name, *parts = description.split(", ")
    is_full = False
    for part in parts:
        is_full = is_full or len(name) + len(part) + 2 > SHORT_NAME
        if not is_full or SENT_AS in part:
            name = f"{name}, {part}"
    return name


class Strategy(BaseModel):
    """A decision about gradients, made once and interpreted by the live driver and by replay.

    Subclasses are frozen values whose fields are the options in a plan file. ``dimension`` is the dimension of the
    device mesh along which the strategy shares the work. ``decide`` is pure: the same job gives the same schedule in
    every process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    dimension: ClassVar[str] = DATA

    declared_permissions: ClassVar[tuple[Permission, ...]] = ()
    """Permissions that the strategy introduces; users grant them by name."""

    @abstractmethod
    def decide(self, job: Job) -> Schedule:
        """Decide what ``job`` communicates. Raises PlanError if the options do not fit its model."""

    def spelled_out(self, job: Job) -> Self:
        """Return the same decision with all values taken from ``job`` written out, as in a plan file."""
        del job
        return self

    def with_buckets(self, schedule: Schedule, job: Job) -> Self | None:
        """This kind of strategy with the buckets of ``schedule``, written out; None if it cannot have them."""
        del schedule, job
        return None

    def beside(self, alternative: Strategy) -> Strategy:
        """Replace the part of this decision that ``alternative`` is an alternative to; by default all of it."""
        return alternative

    @property
    def changes_training(self) -> str:
        """Describe how training differs from all-reduce; "" if it does not.

        Such strategies are chosen only with the user's permission (``headway.permission``).
        """
        return ""

    @property
    def family(self) -> str:
        """Family of the strategy. Predictions are more certain if a strategy of the same family was recorded."""
        return self.name

    @property
    def counts_steps(self) -> bool:
        """Whether ranks synchronise after a fixed number of local steps, so that no rank may skip a step."""
        return False

    @property
    def repeats_after(self) -> int:
        """Period of the communication pattern in steps; replays average over whole periods."""
        return 1

    @property
    def decides_while_training(self) -> bool:
        """Whether decisions are made during training, which ``headway run --decisions`` records."""
        return False

    @property
    def begins_as(self) -> Strategy:
        """What does the steps at first, where the strategy is changed while the job trains; else itself."""
        return self

    @property
    def permission(self) -> str:
        """Permission required to choose the strategy (``headway.permission``); "" for none."""
        return ASYNCHRONOUS if self.changes_training else ""

    @property
    def permissions(self) -> frozenset[str]:
        """All required permissions: ``permission``, or those of all parts of a composed strategy."""
        return frozenset((self.permission,)) - {""}

    @abstractmethod
    def describe(self) -> str:
        """Describe the strategy and its options briefly, for tables."""


def decided(strategy: Strategy, job: Job) -> Schedule:
    """Return what ``strategy`` decides for ``job``. Raises as ``decide``, and PluginFaultError for faulty plug-ins."""
    with asking("strategy", strategy):
        schedule: object = strategy.decide(job)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"decide() returned {type(schedule).__name__}, expected a schedule")
        return schedule


def fits(job: Job, policy: type[Strategy]) -> bool:
    """Whether strategies of class ``policy`` apply to ``job``: whole models, or models split into stages."""
    return (len(job.stages) > 1) == (policy.dimension == PIPELINE)
