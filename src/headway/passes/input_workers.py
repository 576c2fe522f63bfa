"""The input pipeline: batches are loaded by processes of their own, ahead of the steps that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from headway.graph.timeline import Part
from headway.passes.measured import MeasuredPass
from headway.units import counted

if TYPE_CHECKING:
    from torch import nn


class InputWorkers(MeasuredPass):
    """Each ``DataLoader`` of a data set that can be indexed has ``workers`` processes, whatever the script says.

    Samples come in the same order. What a sample draws by chance, as augmentations do, is drawn in another process, and
    so it differs.
    """

    name: ClassVar[str] = "input"
    measured_by: ClassVar[str] = "loading TRACE [WORKERS]"
    parts: ClassVar[tuple[str, ...]] = (Part.INPUT, Part.FORWARD, Part.BACKWARD)

    workers: int = Field(ge=1, le=256)
    """How many processes load batches, for each rank."""

    prefetch: int = Field(default=2, ge=1, le=256)
    """How many batches each of them loads ahead."""

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself. Loaders over which the process begins to iterate from now on have the workers.

        Raises UnsupportedError there for a data set that can only be iterated: each worker would load all of it.
        """
        del optimizer
        from headway.passes.loader_workers import give_workers

        give_workers(self.workers, self.prefetch)
        return module

    def describe(self) -> str:
        """Say how many workers load how far ahead."""
        return f"{counted(self.workers, 'loader worker')}, {counted(self.prefetch, 'batch', 'batches')} ahead each"
