"""Logs the loss and the end time of every step of a training script."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class StepLog:
    """Rank 0's losses and step end times, independent of any recording. Nothing is written if ``path`` is None."""

    path: Path | None
    losses: list[torch.Tensor] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def step(self, loss: torch.Tensor) -> None:
        """Add a step; the loss is read only when the log is written."""
        self.losses.append(loss.detach())
        self.ends_s.append(time.perf_counter())

    def write(self) -> None:
        """Write the log, on rank 0."""
        if self.path is not None and os.environ.get("RANK", "0") == "0":
            data = {"losses": [float(loss) for loss in self.losses], "ends_s": self.ends_s}
            unfinished = self.path.with_suffix(".writing")
            unfinished.write_text(json.dumps(data))
            unfinished.replace(self.path)
