"""What every strategy's policy is: an immutable, validated value that decides, and touches nothing."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from headway.job import Job
from headway.scheduling.schedule import Schedule


class Strategy(BaseModel):
    """A decision about gradients, made once and interpreted by the live driver and by replay.

    Subclasses are frozen values whose fields are the options a plan file holds. ``dimension`` is that of the device
    mesh which the strategy shares the work along. ``decide`` is pure: the same
    job gives the same schedule in every process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ClassVar[str]
    dimension: ClassVar[str] = "data"

    def decide(self, job: Job) -> Schedule:
        """Decide what ``job`` communicates. Raises PlanError where the options do not fit its model."""
        raise NotImplementedError

    def spelled_out(self, job: Job) -> Self:
        """The same decision with everything written out that it takes from ``job``, as a plan file holds it."""
        del job
        return self

    def describe(self) -> str:
        """Say the strategy and its options in a few words, for tables."""
        raise NotImplementedError
