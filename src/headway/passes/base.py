"""What every pass is: an immutable, validated value that rewrites a job in replay, and is applied to a live model."""

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
    """One change of a job, decided once. Its fields are the options in a plan file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    api_version: ClassVar[int] = API_VERSION
    """The version of ``headway.ext`` that it was written for; a package that says so is refused by another one."""

    declared_permissions: ClassVar[tuple[Permission, ...]] = ()
    """New permissions that it may need: users give them by these names, and are told what they change."""

    saves_memory_alone: ClassVar[bool] = False
    """Whether it makes no step faster, and is proposed only where a plan needs more memory than there is."""

    stands_first: ClassVar[bool] = False
    """Whether it has to be the first pass of a plan, as what it does was measured of a job without any other."""

    changes_module: ClassVar[bool] = True
    """Whether it is the module that is changed, once and for good; not its optimizers, nor its data."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """The passes of this kind that are worth a replay for ``job``; none by default. Pure."""
        del job
        return ()

    @property
    def changes_training(self) -> str:
        """What of the training this pass changes, in words, so that the user has to permit it; "" for nothing."""
        return ""

    @property
    def permission(self) -> str:
        """The permission without which it is never chosen (``headway.permission``); "" for none."""
        return PRECISION if self.changes_training else ""

    @property
    def leaves_out_steps(self) -> bool:
        """Whether steps of the optimizer may be left out under it, on ranks whose gradients are not finite."""
        return False

    @abstractmethod
    def rewrite(self, job: Job) -> Job:
        """``job`` as it would be under this pass. Pure. Raises UnsupportedError if that is unknown."""

    def prepare(self) -> None:
        """Whatever has to happen in a process before the script makes its optimizers; nothing by default."""

    @abstractmethod
    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` as it is trained under this pass, before a strategy wraps it. ``optimizer`` may be None.

        Raises UnsupportedError if it would train wrongly.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say the pass and its options in a few words, for tables."""


def rewritten(job: Job, passes: Iterable[Pass]) -> Job:
    """``job`` under ``passes``, in their order. Raises as ``rewrite``, and PluginFaultError for others' faults."""
    for pass_ in passes:
        with asking("pass", pass_):
            changed: object = pass_.rewrite(job)
            if not isinstance(changed, Job):
                raise TypeError(f"rewrite() returned {type(changed).__name__}, expected a job")
            job = changed
    return job


def whole_model(job: Job, what: str) -> ModelSpec:
    """The model that every rank of ``job`` trains. Raises UnsupportedError for stages of a pipeline."""
    if len(job.stages) > 1:
        raise UnsupportedError(
            f"{what} is not predicted for a model that is cut into stages",
            got=f"{len(job.stages)} stages", expected="a model that every rank trains as a whole",
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    return job.model


def with_timelines(job: Job, change: Callable[[Timeline], Timeline]) -> Job:
    """``job`` with every step of every rank changed so, also where names of computation are scaled later."""
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
    """``regions`` themselves. Raises ValueError where one is the whole model, comes twice or lies within another."""
    for region in regions:
        if (
            not region
            or regions.count(region) > 1
            or any(lies_in(region, other) for other in regions if other != region)
        ):
            raise ValueError(f"{region!r} is given twice, lies within another, or is the whole model")
    return regions


def check_trained(regions: Iterable[str], model: ModelSpec) -> None:
    """Raise UnsupportedError for one in which ``model`` trains no parameter."""
    for region in regions:
        if not any(lies_in(parameter.module, region) for parameter in model.parameters):
            raise UnsupportedError(
                "there is no module of that name that trains parameters", got=repr(region),
                expected="the path of a module in the wrapped model",
            )  # fmt: skip


def region_of(module: str, regions: Iterable[str]) -> str:
    """The region that ``module`` lies in; "" for none."""
    return next((region for region in regions if lies_in(module, region)), "")


def in_few_words(regions: tuple[str, ...]) -> str:
    """The only one of ``regions``, or how many they are."""
    return regions[0] if len(regions) == 1 else f"{len(regions)} modules"
