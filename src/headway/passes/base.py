"""The base class of passes: immutable, validated values that rewrite a job in replay and change a live model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from headway.errors import UnsupportedError
from headway.graph.computation import Computation, RankTimelines, Timeline
from headway.job import Job
from headway.model import ModelSpec
from headway.permission import PRECISION, Permission
from headway.plugins import API_VERSION, asking

if TYPE_CHECKING:
    from torch import nn


class Pass(BaseModel):
    """One change of a job. Its fields are the options in a plan file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    """The version of ``headway.ext`` that it was written for; other versions refuse to load it."""

    declared_permissions: ClassVar[tuple[Permission, ...]] = ()
    """Additional permissions that it may need, with the names that users pass and what they change."""

    saves_memory_alone: ClassVar[bool] = False
    """Whether it only saves memory, and so is proposed only for plans that exceed the memory limit."""

    stands_first: ClassVar[bool] = False
    """Whether it must be the first pass of a plan, because its effect was measured without other passes."""

    changes_module: ClassVar[bool] = True
    """Whether it changes the module permanently, as opposed to its optimizers or data."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """Candidates of this kind to replay for ``job``; none by default. Has no side effects."""
        del job
        return ()

    @property
    def changes_training(self) -> str:
        """What it changes in the results of training, which the user has to permit; "" for nothing."""
        return ""

    @property
    def permission(self) -> str:
        """The permission that it needs (``headway.permission``); "" for none."""
        return PRECISION if self.changes_training else ""

    @property
    def leaves_out_steps(self) -> bool:
        """Whether optimizer steps are skipped when gradients are not finite."""
        return False

    @abstractmethod
    def rewrite(self, job: Job) -> Job:
        """``job`` under this pass, without side effects. Raises UnsupportedError if its effect cannot be predicted."""

    def prepare(self) -> None:
        """Set up the process before the script creates its optimizers; does nothing by default."""

    @abstractmethod
    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Apply the pass to ``module`` before a strategy wraps it; returns the module. ``optimizer`` may be None.

        Raises UnsupportedError if the module would train incorrectly.
        """

    @abstractmethod
    def describe(self) -> str:
        """The pass and its options in a few words, for tables."""


def rewritten(job: Job, passes: Iterable[Pass]) -> Job:
    """``job`` under ``passes``, in order. Raises as ``rewrite``, and PluginFaultError for faults of plug-ins."""
    for pass_ in passes:
        with asking("pass", pass_):
            changed: object = pass_.rewrite(job)
            if not isinstance(changed, Job):
                raise TypeError(f"rewrite() returned {type(changed).__name__}, expected a job")
            job = changed
    return job


def whole_model(job: Job, what: str) -> ModelSpec:
    """The model of ``job``. Raises UnsupportedError for pipelines, where no rank trains the whole model."""
    if len(job.stages) > 1:
        raise UnsupportedError(
            f"{what} cannot be predicted for a pipeline",
            got=f"{len(job.stages)} stages", expected="ranks that each train the whole model",
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    return job.model


def with_timelines(job: Job, change: Callable[[Timeline], Timeline]) -> Job:
    """``job`` with ``change`` applied to every step of every rank, also after later scaling of computation."""
    if job.computation is None:
        return job
    return replace(job, computation=_changed(job.computation, change))


def _changed(computation: Computation, change: Callable[[Timeline], Timeline]) -> Computation:
    def all_of(timelines: RankTimelines) -> dict[int, tuple[Timeline, ...]]:
        return {rank: tuple(map(change, steps)) for rank, steps in timelines.items()}

    again = computation.with_factors
    if again is None:
        return replace(computation, timelines=all_of(computation.timelines))

    def with_factors(factors: Mapping[str, float]) -> RankTimelines:
        return all_of(again(factors))

    return replace(computation, timelines=all_of(computation.timelines), with_factors=with_factors)


def lies_in(module: str, region: str) -> bool:
    """Whether ``module`` is ``region`` or lies within it."""
    return module == region or module.startswith(region + ".")


def check_apart(regions: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``regions``. Raises ValueError if one is the whole model, is repeated or lies within another."""
    for region in regions:
        if (
            not region
            or regions.count(region) > 1
            or any(lies_in(region, rival) for rival in regions if rival != region)
        ):
            raise ValueError(f"{region!r} is repeated, lies within another module, or is the whole model")
    return regions


def check_trained(regions: Iterable[str], model: ModelSpec) -> None:
    """Raise UnsupportedError for a region in which ``model`` trains no parameter."""
    for region in regions:
        if not any(lies_in(parameter.module, region) for parameter in model.parameters):
            raise UnsupportedError(
                "no module of this name trains parameters", got=repr(region),
                expected="the path of a module in the wrapped model",
            )  # fmt: skip


def region_of(module: str, regions: Iterable[str]) -> str:
    """The region that ``module`` lies in; "" for none."""
    return next((region for region in regions if lies_in(module, region)), "")


def in_few_words(regions: tuple[str, ...]) -> str:
    """The name of a single region, or the number of ``regions``."""
    return regions[0] if len(regions) == 1 else f"{len(regions)} modules"
