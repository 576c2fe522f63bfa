"""One way to train an ordinary module, in one process or as a pipeline, for the tests of pipelined modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import headway

MICRO_BATCHES, ROWS, WIDTH = 4, 3, 8
State = dict[str, Any]


class Step:
    """One way to train: in one process (``pipelined`` is None) or on a rank; both are called alike."""

    example: Any = None

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        options: dict[str, Any] | None,
        mesh: DeviceMesh | None = None,
        pipelines: int = 1,
    ) -> None:
        self._made_of = (make_optimizer, options, mesh, pipelines)
        self.model, self.optimizer = model, make_optimizer(model)
        self.pipelines, self.pipeline = pipelines, 0 if mesh is None else mesh.get_local_rank("data")
        self.pipelined: Any = None
        if options is not None:
            options, data = dict(options), options.get("data")
            options.pop("data", None)
            planned = headway.strategy("pipeline", **{"micro_batches": MICRO_BATCHES, **options})
            if data is not None:
                planned = headway.strategy("mesh", pipeline=planned, data=headway.strategy(**data))
            given: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
            self.pipelined = headway.parallelize(
                model, self.optimizer, planned, loss_fn=self.loss, example_batch=self.example, **given
            )

    def again(self, model: nn.Module, **options: Any) -> Step:
        """Another model trained in the same way, but for ``options``."""
        make_optimizer, given, mesh, pipelines = self._made_of
        more: dict[str, Any] = {} if pipelines == 1 else {"mesh": mesh, "pipelines": pipelines}
        return type(self)(model, make_optimizer, None if given is None else {**given, **options}, **more)

    def batches(self, steps: int = 3) -> Iterator[tuple[Any, torch.Tensor]]:
        """Inputs and targets of all pipelines."""
        return batches(steps, self.pipelines * MICRO_BATCHES * ROWS)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What is trained for."""
        return nn.functional.mse_loss(output, target)

    def train(self, data: Any, target: torch.Tensor) -> float:
        """Forward and backward; the loss."""
        like = next(self.model.parameters())
        data, target = data.to(like.dtype), target.to(like.dtype)
        if self.pipelined is not None:
            return float(self.pipelined.train_step(self.own(data), self.own(target)))
        loss = self.loss(self.model(data), target)
        loss.backward()
        return float(loss.detach())

    def train_in_parts(self, data: torch.Tensor, target: torch.Tensor) -> float:
        """The same where modules see micro-batches, and buffers are those of the first pipeline."""
        if self.pipelined is not None:
            return self.train(data, target)
        parts = self.pipelines * MICRO_BATCHES
        kept, losses = [], []
        for number, (some, wanted) in enumerate(zip(data.chunk(parts), target.chunk(parts), strict=True)):
            if number == MICRO_BATCHES:
                kept = [each.clone() for each in self.model.buffers()]
            loss = nn.functional.mse_loss(self.model(some), wanted)
            (loss / parts).backward()
            losses.append(float(loss.detach()))
        for buffer, value in zip(self.model.buffers(), kept, strict=False):
            buffer.copy_(value)
        return sum(losses) / parts

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """The part of this rank's pipeline."""
        return batch.chunk(self.pipelines)[self.pipeline]

    def evaluate(self, data: torch.Tensor) -> float:
        """The sum of the output."""
        if self.pipelined is None:
            self.model.eval()
            with torch.no_grad():
                found = self.model(data).sum()
            self.model.train()
            return float(found)
        output = self.pipelined.evaluate(self.own(data))
        total = torch.zeros((), dtype=torch.float64) if output is None else output.sum().double()
        dist.all_reduce(total)
        return float(total)

    def clip_values(self, most: float) -> None:
        """Clip every element of gradients."""
        nn.utils.clip_grad_value_((self.pipelined or self.model).parameters(), most)

    def clip(self, most: float) -> float:
        """Clip gradients; their norm."""
        if self.pipelined is not None:
            return float(self.pipelined.clip_grad_norm_(most))
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), most))

    def state(self) -> State:
        """The whole model's."""
        found = self.pipelined.full_state_dict() if self.pipelined is not None else self.model.state_dict()
        return {name: value.flatten().tolist() for name, value in found.items()}

    def whole_state(self) -> dict[str, torch.Tensor]:
        """A copy of the whole model's."""
        found = self.pipelined.full_state_dict() if self.pipelined is not None else self.model.state_dict()
        return {name: value.clone() for name, value in found.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state."""
        take = (
            self.pipelined.load_full_state_dict if self.pipelined is not None else self.model.load_state_dict
        )
        take(state)


def batches(steps: int = 3, rows: int = MICRO_BATCHES * ROWS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        )
