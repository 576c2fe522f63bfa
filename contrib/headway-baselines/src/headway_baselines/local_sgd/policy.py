"""Policy of local SGD (Stich, ICLR 2019) and of DiLoCo (Douillard et al., 2023): how long ranks train by themselves."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.job import Job
from headway.permission import LOCAL_STEPS
from headway.strategies.base import Strategy
from headway_baselines.local_sgd.schedule import OuterStep, PeriodicSchedule

OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo, section 3
OUTER_OPTIONS = ("outer_learning_rate", "outer_momentum", "nesterov")


class LocalSGDStrategy(Strategy):
    """Every rank takes some optimizer steps of its own; then the models of all ranks are averaged by an all-reduce.

    With an outer optimizer, which takes the averaged change for a gradient, it is DiLoCo. It does not train as
    all-reduce does: ranks hold different models within a period.
    """

    name: ClassVar[str] = "local-sgd"

    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """How many optimizer steps of each rank a period has (H)."""

    outer_optimizer: Literal["none", "sgd"] = "none"
    """none: ranks go on with the mean. sgd: the change from the period's beginning to the mean is the negative gradient
    of a step of SGD on the parameters that the period began with, as in DiLoCo."""

    outer_learning_rate: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None = None
    """Of the outer optimizer; by default DiLoCo's 0.7."""

    outer_momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of the outer optimizer; by default DiLoCo's 0.9."""

    nesterov: bool | None = None
    """Whether the outer momentum is Nesterov's; by default it is where there is momentum."""

    moments: Literal["local", "averaged"] = "local"
    """Whether the optimizer's state is averaged too, or stays each rank's own."""

    buffers: Literal["averaged", "local"] = "averaged"
    """Whether running means and variances of normalisation layers are averaged, or stay each rank's own."""

    @model_validator(mode="after")
    def _outer_options_have_an_optimizer(self) -> Self:
        given = [name for name in OUTER_OPTIONS if getattr(self, name) is not None]
        if given and self.outer_optimizer == "none":
            raise ValueError(f"{', '.join(given)}: expected outer_optimizer: sgd too")
        if self.nesterov and self.outer_momentum == 0:
            raise ValueError("nesterov: expected an outer_momentum above 0")
        return self

    @property
    def counts_steps(self) -> bool:
        """Ranks average at the end of a period."""
        return True

    @property
    def outer(self) -> OuterStep | None:
        """The outer step with all of its options; None where the mean is taken as it is."""
        if self.outer_optimizer == "none":
            return None
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        momentum = OUTER_MOMENTUM if momentum is None else momentum
        nesterov = momentum > 0 if self.nesterov is None else self.nesterov
        return OuterStep(OUTER_LEARNING_RATE if rate is None else rate, momentum, nesterov)

    def decide(self, job: Job) -> PeriodicSchedule:
        """Fix the period and the rule."""
        return PeriodicSchedule(job.world_size, self.steps, self.moments, self.buffers, self.outer)

    @property
    def changes_training(self) -> str:
        """Models of their own for a period, and the outer step."""
        said = f"every rank trains a model of its own for {self.steps} steps, instead of summing gradients in each"
        outer = (
            "; the models' mean change is the gradient of an outer optimizer"
            if self.outer is not None
            else ""
        )
        return said + outer

    @property
    def permission(self) -> str:
        """That of steps of each rank's own."""
        return LOCAL_STEPS

    def describe(self) -> str:
        """Say the strategy and its options in a few words."""
        said = [f"local SGD, {self.steps} steps a period"]
        if (outer := self.outer) is not None:
            kind = "Nesterov " * outer.nesterov + f"momentum {outer.momentum:g}"
            said = [f"DiLoCo, {self.steps} steps a period", f"outer SGD at {outer.learning_rate:g}, {kind}"]
        said += ["moments averaged"] * (self.moments == "averaged") + ["buffers local"] * (
            self.buffers == "local"
        )
        return ", ".join(said)
