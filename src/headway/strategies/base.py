"""What every strategy's policy is: an immutable, validated value that decides, and touches nothing."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from headway.job import Job
from headway.permission import ASYNCHRONOUS, Permission
from headway.plugins import asking
from headway.scheduling.schedule import Schedule

DATA, PIPELINE = "data", "pipeline"
"""Dimensions: along the one every rank trains the whole model, or its stage; along the other each has a stage."""
DATA_INSIDE = "data inside hosts"
"""The inner part of the former, where stages lie between the two parts: replicas on one host, and then on others."""


SHORT_NAME = 60
SENT_AS = "sent as"  # begins what strategies say of their codecs


def short_name(description: str) -> str:
    """The first parts of what a strategy says of itself, as many as are read at a glance, and any codecs."""
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
    """New permissions that it may need: users give them by these names, and are told what they change."""

    @abstractmethod
    def decide(self, job: Job) -> Schedule:
        """Decide what ``job`` communicates. Raises PlanError if the options do not fit its model."""

    def spelled_out(self, job: Job) -> Self:
        """The same decision with everything that it takes from ``job`` written out, as in a plan file."""
        del job
        return self

    def beside(self, alternative: Strategy) -> Strategy:
        """``other`` in the place of that part of this decision that it is an alternative to; by default of all."""
        return alternative

    @property
    def changes_training(self) -> str:
        """What it changes of what is trained, in words; "" for strategies that train as all-reduce does.

        Nothing that changes the training is chosen unless the user has permitted it (``headway.permission``).
        """
        return ""

    @property
    def family(self) -> str:
        """Predictions of a strategy are surer where one of its family was recorded."""
        return self.name

    @property
    def counts_steps(self) -> bool:
        """Whether ranks meet after so many steps of each, with gradients of their own: none may leave out a step."""
        return False

    @property
    def repeats_after(self) -> int:
        """After how many steps it communicates the same again; replays are means over whole such periods."""
        return 1

    @property
    def decides_while_training(self) -> bool:
        """Whether something is decided while the job trains, which ``headway run --decisions`` writes down."""
        return False

    @property
    def permission(self) -> str:
        """The permission without which it is never chosen (``headway.permission``); "" for none."""
        return ASYNCHRONOUS if self.changes_training else ""

    @property
    def permissions(self) -> frozenset[str]:
        """All permissions that it needs: ``permission``, unless its parts need several."""
        return frozenset((self.permission,)) - {""}

    @abstractmethod
    def describe(self) -> str:
        """Say the strategy and its options in a few words, for tables."""


def decided(strategy: Strategy, job: Job) -> Schedule:
    """What ``strategy`` decides for ``job``. Raises as ``decide``, and PluginFaultError for another package's fault."""
    with asking("strategy", strategy):
        schedule: object = strategy.decide(job)
        if not isinstance(schedule, Schedule):
            raise TypeError(f"decide() returned {type(schedule).__name__}, expected a schedule")
        return schedule


def fits(job: Job, policy: type[Strategy]) -> bool:
    """Whether decisions of that class are for models as those of ``job``: whole ones, or cut into stages."""
    return (len(job.stages) > 1) == (policy.dimension == PIPELINE)
