"""One training script run in four ways: alone on everybody's data, under stock DDP, and decoupled in its two ways.

A case is a function of a ``Job``. Alone, the job hands it the rows of all ranks, in rank order, and a bare model; that
run is the reference, and Headway is not even imported in it. Otherwise the job hands it this rank's rows and a wrapped
model. What the script shows to ``Job.see`` must be the same in every way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ALONE, DDP, GRADIENTS, PARAMETERS = "alone", "ddp", "gradients", "parameters"
HANDED_OVER, TURNS = "handed over", "turns"
"""Decoupled, but stock DDP does the steps: all of them, or every other one."""
CAP_BYTES = 300  # several buckets even of the smallest model
PER_RANK = 4
CPU, CUDA = "cpu", "cuda"
WIDTH = 6


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one rank."""

    rank: int
    x: torch.Tensor
    y: torch.Tensor


class Alone(nn.Module):
    """Stands in for a wrapper in a single process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def no_sync(self) -> Any:
        return nullcontext()


class Job:
    """How a script gets its model wrapped and its data, and notes what it sees."""

    def __init__(self, mode: str, rank: int, world_size: int, folder: Path | None = None) -> None:
        self.mode, self.rank, self.world_size = mode, rank, world_size
        self.folder = folder  # where cases leave files for each other
        self.alone = mode == ALONE
        self.seen: dict[str, torch.Tensor | None] = {}
        self.models: list[Any] = []
        self._times: dict[str, int] = {}
        self._losses: list[torch.Tensor] = []

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """``module`` as this job trains it. ``options`` are those of DistributedDataParallel.

        And ``decision``, options of the decoupled strategy, which the other ways do without.
        """
        self.models.append(wrap(module, self.mode, **options))
        return self.models[-1]

    def is_rank(self, rank: int) -> bool:
        """Whether what only ``rank`` does is done here; alone, one process does it for all."""
        return self.alone or self.rank == rank

    # Data ------------------------------------------------------------------------------------------

    def shares(self, step: int) -> list[Share]:
        """The rows of every rank that this process trains for."""
        x, y = rows(PER_RANK * self.world_size, step)
        shares = [
            Share(rank, x[rank * PER_RANK :][:PER_RANK], y[rank * PER_RANK :][:PER_RANK])
            for rank in range(self.world_size)
        ]
        return shares if self.alone else [shares[self.rank]]

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All the rows that this process trains for, as one batch."""
        shares = self.shares(step)
        return torch.cat([share.x for share in shares]), torch.cat([share.y for share in shares])

    def loss(self, model: Any, step: int) -> torch.Tensor:
        """The mean squared error on this process's rows; ranks have equally many, so the mean of means is the mean."""
        x, y = self.batch(step)
        return nn.functional.mse_loss(model(x), y)

    def backward_by_rank(
        self,
        model: Any,
        loss_of: Callable[[Share], torch.Tensor],
        shares: list[Share],
        divisor: int | None = None,
    ) -> None:
        """Backward of each rank's own loss, for what must be rounded, skipped or counted rank by rank.

        Alone, each rank's gradient is computed by itself, and their sum over ``divisor``, which is the number of ranks
        unless said otherwise, is added to what ``.grad`` held.
        """
        if not self.alone:
            for share in shares:
                loss_of(share).backward()
            return
        parameters = list(model.parameters())
        before = [p.grad for p in parameters]
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for share in shares:
            for p in parameters:
                p.grad = None
            loss_of(share).backward()
            for index, p in enumerate(parameters):
                part, so_far = p.grad, sums[index]
                if part is not None:
                    sums[index] = part if so_far is None else so_far + part
        for p, earlier, total in zip(parameters, before, sums, strict=True):
            mean = None if total is None else total / (divisor or self.world_size)
            p.grad = earlier if mean is None else mean if earlier is None else earlier + mean

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a value of which each rank has its own."""
        value = value.detach().clone()
        if not self.alone:
            dist.all_reduce(value)
            value /= self.world_size
        return value

    # Findings --------------------------------------------------------------------------------------

    def see(self, what: str, value: Any) -> None:
        """Note copies of all tensors and numbers in ``value``; the n-th time is compared with the n-th time."""
        time = self._times[what] = self._times.get(what, 0) + 1
        for path, leaf in _leaves(value, f"{what} #{time}"):
            self.seen[path] = None if leaf is None else torch.as_tensor(leaf).detach().to(CPU, copy=True)

    def see_loss(self, loss: torch.Tensor) -> None:
        """Note a loss, without any communication now."""
        self._losses.append(loss.detach().clone())

    def finish(self) -> None:
        """Note losses, as means over ranks, and the parameters and gradients of every model."""
        if self._losses:
            self.see("losses", self.mean(torch.stack(self._losses)))
        for model in self.models:
            self.see("parameters", list(model.parameters()))
            self.see("gradients", [p.grad for p in model.parameters()])

    def digest(self) -> str:
        """Equal on two ranks only if all parameters are the same there to the last bit."""
        values = [
            p.detach().cpu().contiguous().numpy().tobytes()
            for model in self.models
            for p in model.parameters()
        ]
        return hashlib.sha256(b"".join(values)).hexdigest()


def wrap(module: nn.Module, mode: str, **options: Any) -> Any:
    """``module`` ready for training in ``mode``, with several buckets."""
    decision: dict[str, Any] = {"bucket_cap_bytes": CAP_BYTES, **options.pop("decision", {})}
    if mode == ALONE:
        return Alone(module)
    if mode == DDP:
        return DistributedDataParallel(module, bucket_cap_mb=CAP_BYTES / 2**20, **options)
    from headway.job import Job as TrainedJob
    from headway.scheduling.buckets import GATHER_MODES
    from headway.strategies.decoupled.policy import DecoupledStrategy
    from headway.strategies.decoupled.wrapper import DecoupledDataParallel
    from headway.strategies.live.module_spec import model_spec

    if mode in GATHER_MODES:
        decision["gather"] = mode
    schedule = DecoupledStrategy(**decision).decide(TrainedJob.of(model_spec(module)))
    if mode not in (HANDED_OVER, TURNS):
        return DecoupledDataParallel(module, schedule=schedule, **options)
    from tests.behaviour.adaptive_models import under_schedule

    wrapped: Any = under_schedule(module, schedule, **options)
    if mode == HANDED_OVER:
        wrapped.use_stock_ddp()
    else:
        from tests.behaviour.decoupled.turns import Turns

        wrapped.tuner = Turns(wrapped)
    return wrapped


def rows(count: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step: ``count`` rows, the same ones for any larger count as well."""
    generator = torch.Generator(CPU).manual_seed(1000 + step)
    both = torch.randn(count, WIDTH + 3, generator=generator, dtype=torch.float64, device=CPU)
    both = both.to(torch.get_default_device())
    return both[:, :WIDTH].contiguous(), both[:, WIDTH:].contiguous()


def mlp(seed: int = 0) -> nn.Sequential:
    """Eight parameters of different sizes, in double precision."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def sgd(model: Any, **options: Any) -> torch.optim.SGD:
    """The optimizer of cases that are not about optimizers: with momentum, so that a lost step shows for long."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def train(job: Job, model: Any, optimizer: Any, steps: int = 3, start: int = 0) -> None:
    """The plainest loop. Its losses show whether forward had the right parameters, without reading them."""
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = job.loss(model, step)
        loss.backward()
        optimizer.step()
        job.see_loss(loss)


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """What the optimizer would save, without the hyper-parameters."""
    return optimizer.state_dict()["state"]


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


@dataclass(frozen=True, slots=True)
class Case:
    """A script, how close it must come to the reference, and where it can be run at all.

    ``devices`` are the kinds of device that models and data may be on; the script makes them on torch's default device.
    """

    name: str
    script: Callable[[Job], None]
    tolerance: float
    only_in: tuple[str, ...]
    not_in: tuple[str, ...]
    world_sizes: tuple[int, ...]
    devices: tuple[str, ...]


CASES: dict[str, Case] = {}
EXACT = 1e-12  # double precision: sums of a few terms in another order
FEW_ULPS = 2e-6  # single precision: 16 units in the last place of 1


def case(
    *,
    name: str = "",
    tolerance: float = EXACT,
    only_in: Iterable[str] = (DDP, GRADIENTS, PARAMETERS, HANDED_OVER, TURNS),
    not_in: Iterable[str] = (),
    world_sizes: Iterable[int] = (),
    devices: Iterable[str] = (CPU, CUDA),
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """Register a script as a case. ``tolerance`` bounds the absolute and the relative difference."""

    def register(script: Callable[[Job], None]) -> Callable[[Job], None]:
        chosen = name or script.__name__
        assert chosen not in CASES, chosen
        CASES[chosen] = Case(
            chosen, script, tolerance, tuple(only_in), tuple(not_in), tuple(world_sizes), tuple(devices)
        )
        return script

    return register
