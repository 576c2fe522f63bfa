"""The input pipeline: batches are loaded by processes of their own, ahead of the steps that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from headway.graph.timeline import Part
from headway.passes.measured import MeasuredPass
from headway.permission import RANDOMNESS
from headway.units import counted

if TYPE_CHECKING:
    from torch import nn


class InputWorkers(MeasuredPass):
    """Loaders that load in the rank's own process, of data sets that can be indexed, have ``workers`` processes.

    Samples come in the same order. What the data set draws by chance, as augmentations do, is drawn in other
    processes, and so it differs; what it remembers is forgotten with each epoch.
    """

    name: ClassVar[str] = "input"
    changes_module: ClassVar[bool] = False
    measured_by: ClassVar[str] = "python -m headway.measuring.loading TRACE [WORKERS]"
    parts: ClassVar[tuple[str, ...]] = (Part.INPUT, Part.FORWARD, Part.BACKWARD)

    workers: int = Field(ge=1, le=256)
    """How many processes load batches, for each rank."""

    prefetch: int = Field(default=2, ge=1, le=256)
    """How many batches each of them loads ahead."""

    @property
    def changes_training(self) -> str:
        """That samples are made elsewhere."""
        return "workers load batches, in which data sets draw other random numbers and keep no state"

    @property
    def permission(self) -> str:
        """What it needs."""
        return RANDOMNESS

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself. Loaders over which a training loop begins from now on have the workers."""
        del optimizer
        from headway.passes.loader_workers import give_workers

        give_workers(self.workers, self.prefetch)
        return module

    def describe(self) -> str:
        """Say how many workers load how far ahead."""
        return f"{counted(self.workers, 'loader worker')}, {counted(self.prefetch, 'batch', 'batches')} ahead each"
