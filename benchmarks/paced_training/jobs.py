"""Jobs: how the measured model is made and what one step of it computes. Paced, or real."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from headway.demo.train_digits import convolutional_net
from headway.demo.train_gpt import CONTEXT, GPT
from headway.models.catalogue import MODELS
from paced_training.cases import PacedPlan
from paced_training.paced import PacedModel, Pacing

LEARNING_RATE, MOMENTUM = 0.01, 0.9


def optimizer_of(parameters: Iterable[torch.Tensor]) -> SGD:
    """The optimizer of every method; ``foreach`` is what accelerators default to."""
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, foreach=True)


@dataclass(frozen=True)
class PacedJob:
    """``make`` gives the same initial model in every rank and for every method; ``loss`` runs forward on a batch.

    ``scale`` is by how much the model's bytes were scaled, and so every size that methods are configured with.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    scale: float


@dataclass(frozen=True)
class StepTime:
    forward_s: float
    backward_s: float


class Training:
    """A model being trained by a method: ``wrapped`` is called, ``inner`` owns the device's clock."""

    def __init__(self, job: PacedJob, wrapped: nn.Module, inner: nn.Module) -> None:
        self._job, self._wrapped = job, wrapped
        self._mark, self._restart = _nothing, _nothing
        if isinstance(inner, PacedModel):
            self._mark, self._restart = inner.clock.mark, inner.clock.restart
        self.steps = 0

    def restart(self) -> None:
        """Call before steps that follow upon something else: it must not count as this model's host at work."""
        self._restart()

    def step(self, zero_grad: Callable[[], None], update: Callable[[], None]) -> StepTime:
        """Forward, backward, update."""
        start = time.perf_counter()
        loss = self._job.loss(self._wrapped, self.steps)
        middle = time.perf_counter()
        zero_grad()
        loss.backward()
        self._mark()
        end = time.perf_counter()
        update()
        self._mark()
        self.steps += 1
        return StepTime(middle - start, end - middle)


def paced_job(plan: PacedPlan, rank: int) -> PacedJob:
    table = MODELS[plan.model]()
    pacing = Pacing(scale=1 / plan.shrink, dilation=plan.dilation, rank=rank)
    return PacedJob(lambda: PacedModel(table, pacing), lambda model, _: _call(model), 1 / plan.shrink)


def real_job(model: str, rank: int) -> PacedJob:
    """The demo's models on fixed random batches: computation is real, learning is not the point."""
    if model == "gpt":
        return PacedJob(lambda: _seeded(GPT), lambda net, step: _gpt_loss(net, rank, step), 1.0)
    return PacedJob(lambda: _seeded(convolutional_net), lambda net, step: _digits_loss(net, rank, step), 1.0)


def _call(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model()
    return loss


def _gpt_loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    window = torch.randint(256, (16, CONTEXT + 1), generator=_generator(rank, step))
    return cross_entropy(net(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def _digits_loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = _generator(rank, step)
    images = torch.rand(48, 1, 8, 8, generator=generator)
    return cross_entropy(net(images), torch.randint(10, (48,), generator=generator))


def _generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 * rank + step)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _nothing() -> None:
    pass


def clear(optimizer: Optimizer) -> Callable[[], None]:
    return lambda: optimizer.zero_grad(set_to_none=True)
