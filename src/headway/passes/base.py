"""What every pass is: an immutable, validated value that rewrites a job in replay, and is applied to a live model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from headway.job import Job
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
    for each in passes:
        with asking("pass", each):
            changed: object = each.rewrite(job)
            if not isinstance(changed, Job):
                raise TypeError(f"rewrite() returned {type(changed).__name__}, expected a job")
            job = changed
    return job
