"""How the cases of the decoupled runtime are run on a GPU: over which backend, on how many ranks, all on one GPU."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import pytest
import torch
from tests.behaviour.decoupled import harness, test_exactness
from tests.behaviour.decoupled.job import CUDA, DDP, GRADIENTS, PARAMETERS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@dataclass(frozen=True, slots=True)
class Setup:
    """``slowed`` says that collectives begin late and last long, so that whoever does not wait is overtaken."""

    name: str
    backend: str
    world_size: int
    modes: tuple[str, ...] = (DDP, GRADIENTS, PARAMETERS)
    slowed: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """What a rank loads."""
        return (*(["tests.gpu.slow_collectives"] if self.slowed else []), *test_exactness.MODULES)

    def names(self, mode: str) -> list[str]:
        """The cases that can be run."""
        return harness.names_of(mode, self.world_size, CUDA)

    def problems(self, mode: str) -> dict[str, str]:
        """What is wrong with each case."""
        return harness.problems(
            self.modules, mode, self.world_size, device=CUDA, backend=self.backend
        )  # fmt: skip


NCCL = "cpu:gloo,cuda:nccl"
SETUPS = (
    Setup("NCCL-1", NCCL, 1),
    Setup("NCCL-1-slowed", NCCL, 1, (GRADIENTS, PARAMETERS), slowed=True),
    Setup("Gloo-2", "gloo", 2),
    Setup("Gloo-3", "gloo", 3),
)

for _module in test_exactness.MODULES:
    importlib.import_module(_module)
