"""What every pass is: an immutable, validated value that rewrites a job in replay, and is applied to a live model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from headway.job import Job

if TYPE_CHECKING:
    from torch import nn


class Pass(BaseModel):
    """One change of a job, decided once. Its fields are the options in a plan file.

    ``changes_numerics`` says that training gives different numbers under it, so that nothing proposes it by itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    changes_numerics: ClassVar[bool] = False

    def rewrite(self, job: Job) -> Job:
        """``job`` as it would be under this pass. Pure. Raises UnsupportedError if that is unknown."""
        raise NotImplementedError

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` as it is trained under this pass, before a strategy wraps it. ``optimizer`` may be None.

        Raises UnsupportedError if it would train wrongly.
        """
        raise NotImplementedError

    def describe(self) -> str:
        """Say the pass and its options in a few words, for tables."""
        raise NotImplementedError
