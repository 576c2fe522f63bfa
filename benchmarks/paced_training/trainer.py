"""Trainer: what every method is to the measuring loop, and the one that computes without communication."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from paced_training.jobs import PacedJob, StepTime, Training, optimizer_of

Bound = Literal["all-reduce", "decoupled", "across steps", "none"]


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds for a method, counted from its tensors: ``working`` is gradients and buffers."""

    parameters: int
    working: int
    optimizer: int

    def row(self) -> dict[str, float]:
        mebibytes = {f"{key}_mib": value / 2**20 for key, value in asdict(self).items()}
        return {"peak_mib": sum(mebibytes.values())} | mebibytes


class Trainer:
    """A method at work on a model of its own. The base trains without any communication."""

    name = "alone"
    bound: Bound = "none"

    def __init__(
        self, job: PacedJob, wrapped: nn.Module, inner: nn.Module, optimizer: Optimizer | None
    ) -> None:
        self.job, self.wrapped, self.inner, self.optimizer = job, wrapped, inner, optimizer
        self.training = Training(job, wrapped, inner)
        self.note = ""
        self.tuning_steps_ms: Sequence[float] = ()  # those of training that a method was tuned in
        self.gradient_bytes = 0

    def restart(self) -> None:
        """Call before steps that follow upon something else."""
        self.training.restart()

    def step(self) -> StepTime:
        """One step of training."""
        return self.training.step(self.zero_grad, self.update)

    def zero_grad(self) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        assert self.optimizer is not None
        if not self.gradient_bytes:
            self.gradient_bytes = held_bytes(local(g) for g in self.gradients())
        self.optimizer.step()

    def gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self.inner.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def finish(self) -> None:
        """Wait for everything in flight."""

    def values(self) -> torch.Tensor:
        """All parameters, whole, in one vector."""
        self.finish()
        return torch.cat([p.detach().flatten() for p in self.inner.parameters()])

    def buffer_bytes(self) -> int:
        """Bytes of communication buffers besides parameters and gradients."""
        return 0

    def optimizer_bytes(self) -> int:
        assert self.optimizer is not None
        return state_bytes(self.optimizer)

    def memory(self) -> Memory:
        parameters = held_bytes(local(p) for p in self.inner.parameters())
        return Memory(parameters, self.gradient_bytes + self.buffer_bytes(), self.optimizer_bytes())

    def close(self) -> None:
        """Give back what a garbage collector would not."""


def alone(job: PacedJob) -> Trainer:
    model = job.make()
    return Trainer(job, model, model, optimizer_of(model.parameters()))


def state_bytes(optimizer: Optimizer) -> int:
    states = list(optimizer.state.values())
    return held_bytes(
        local(value) for state in states for value in state.values() if isinstance(value, torch.Tensor)
    )


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the distinct memories behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Every memory behind a tensor that Python knows of, by its address."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = [local(t).untyped_storage() for t in tensors if t.layout is torch.strided]
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    part = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(part, torch.Tensor)
    return part
