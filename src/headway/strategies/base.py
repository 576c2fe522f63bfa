"""What every strategy's policy is: an immutable, validated value that decides, and touches nothing."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule


class Strategy(BaseModel):
    """A decision about gradients, made once and interpreted by the live driver and by replay.

    Subclasses are frozen values whose fields are the options a plan file holds. ``decide`` is pure: the same
    model gives the same schedule in every process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]

    def decide(self, model: ModelSpec) -> BucketSchedule:
        """Decide the buckets of ``model``. Raises PlanError where the options do not fit the model."""
        raise NotImplementedError

    def describe(self) -> str:
        """Say the strategy and its options in a few words, for tables."""
        raise NotImplementedError
