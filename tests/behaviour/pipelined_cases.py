"""What ranks do for the tests of ordinary modules as pipelines: train in many ways, and return the model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headway
from headway.errors import UserError

MICRO_BATCHES, ROWS, WIDTH = 4, 3, 8
State = dict[str, Any]


class Step:
    """One way to train: in one process (``pipelined`` is None) or on a rank; both are called alike."""

    example: Any = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any] | None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.pipelined: Any = None
        if options is not None:
            planned = headway.strategy("pipeline", **{"micro_batches": MICRO_BATCHES, **options})
            self.pipelined = headway.parallelize(
                model, optimizer, planned, loss_fn=self.loss, example_batch=self.example
            )

    def batches(self, steps: int = 3) -> Iterator[tuple[Any, torch.Tensor]]:
        """Inputs and targets."""
        return batches(steps)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What is trained for."""
        return nn.functional.mse_loss(output, target)

    def train(self, data: Any, target: torch.Tensor) -> float:
        """Forward and backward; the loss."""
        like = next(self.model.parameters())
        data, target = data.to(like.dtype), target.to(like.dtype)
        if self.pipelined is not None:
            return float(self.pipelined.train_step(data, target))
        loss = self.loss(self.model(data), target)
        loss.backward()
        return float(loss.detach())

    def clip(self, most: float) -> float:
        """Clip gradients; their norm."""
        if self.pipelined is not None:
            return float(self.pipelined.clip_grad_norm_(most))
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), most))

    def state(self) -> State:
        """The whole model's."""
        found = self.pipelined.full_state_dict() if self.pipelined is not None else self.model.state_dict()
        return {name: value.flatten().tolist() for name, value in found.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a state."""
        take = (
            self.pipelined.load_full_state_dict if self.pipelined is not None else self.model.load_state_dict
        )
        take(state)


def layers(count: int = 6, seed: int = 0) -> nn.Sequential:
    """A plain model."""
    torch.manual_seed(seed)
    found: list[nn.Module] = []
    for _ in range(count // 2):
        found += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*found).double()


def batches(steps: int = 3, rows: int = MICRO_BATCHES * ROWS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield (
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
        )


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def plainly(step: Step) -> list[float]:
    """Three steps."""
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.optimizer.step()
    return losses


def clipped(step: Step) -> list[float]:
    said = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        said.append(step.clip(0.05))
        step.optimizer.step()
    return said


def accumulated(step: Step) -> list[float]:
    """Two batches' gradients an update."""
    losses = []
    for number, (data, target) in enumerate(step.batches(4)):
        losses.append(step.train(data, target))
        if number % 2:
            step.optimizer.step()
            step.optimizer.zero_grad()
    return losses


def scheduled(step: Step) -> list[float]:
    """A learning rate that falls."""
    falls = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.5)
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.optimizer.step()
        falls.step()
    return losses


def evaluated(step: Step) -> list[float]:
    """An evaluation between steps changes nothing."""
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.optimizer.step()
        if step.pipelined is not None:
            step.pipelined.evaluate(data)
    return losses


def resumed(step: Step) -> list[float]:
    """The state of a model goes into it again."""
    losses = plainly(step)
    state = step.pipelined.full_state_dict() if step.pipelined is not None else step.model.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    plainly(step)
    step.load(kept)
    return losses + plainly(step)


def in_bfloat16(step: Step) -> list[float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plainly(step)


class Checkpointed(nn.Module):
    """Its activations are computed again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def tied() -> nn.Sequential:
    model = layers(8)
    model[6].weight = model[0].weight
    return model


def tied_thrice() -> nn.Sequential:
    model = tied()
    model[4].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = layers(8)
    model[2].requires_grad_(False)
    return model


def normed() -> nn.Sequential:
    model = layers()
    model.insert(2, nn.LayerNorm(WIDTH).double())
    return model


def checkpointed() -> nn.Sequential:
    model = layers()
    return nn.Sequential(Checkpointed(model[:2]), Checkpointed(model[2:4]), model[4:])


def single_floats() -> nn.Sequential:
    return layers().float()


def by_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups: biases without weight decay."""
    weights = [each for each in model.parameters() if each.dim() > 1]
    biases = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
    return torch.optim.AdamW(groups, lr=0.02)


Way = tuple[
    Callable[[], nn.Module],
    Callable[[nn.Module], torch.optim.Optimizer],
    Callable[[Step], list[float]],
    dict[str, Any],
]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9, nesterov=True)


WAYS: dict[str, Way] = {
    "plain": (layers, sgd, plainly, {}),
    "1F1B": (layers, sgd, plainly, {"order": "1f1b"}),
    "2F2B": (layers, sgd, plainly, {"order": "kfkb", "group_size": 2}),
    "eager": (layers, sgd, plainly, {"order": "eager-1f1b"}),
    "GPipe": (layers, sgd, plainly, {"order": "gpipe"}),
    "zero-bubble": (layers, sgd, plainly, {"order": "zero-bubble"}),
    "named points": (layers, sgd, plainly, {"split_points": ("1", "5")}),
    "one micro-batch": (layers, sgd, plainly, {"micro_batches": 1}),
    "six micro-batches": (layers, sgd, plainly, {"micro_batches": 6}),
    "momentum": (layers, momentum, plainly, {}),
    "AdamW": (layers, adamw, plainly, {}),
    "groups of parameters": (layers, by_groups, plainly, {}),
    "tied weights": (tied, sgd, plainly, {}),
    "tied on three stages": (tied_thrice, adamw, plainly, {"split_points": ("3", "5")}),
    "tied and accumulated": (tied, sgd, accumulated, {}),
    "tied and clipped": (tied, sgd, clipped, {}),
    "frozen": (frozen, sgd, plainly, {}),
    "layer norms": (normed, adamw, plainly, {}),
    "checkpointing": (checkpointed, sgd, plainly, {}),
    "clipping": (layers, sgd, clipped, {}),
    "accumulation": (layers, sgd, accumulated, {}),
    "learning rates": (layers, momentum, scheduled, {}),
    "evaluations": (layers, sgd, evaluated, {}),
    "resumed": (layers, sgd, resumed, {}),
    "mixed precision": (single_floats, sgd, in_bfloat16, {}),
    "single floats": (single_floats, adamw, plainly, {}),
}


def trained(
    name: str, options: dict[str, Any] | None, ways: dict[str, Way] = WAYS, kind: type[Step] = Step
) -> dict[str, Any]:
    """Losses, and the state at the end."""
    make, make_optimizer, way, given = ways[name]
    model = make()
    step = kind(model, make_optimizer(model), None if options is None else given)
    return {"said": way(step), "state": step.state()}


def in_every_way(rank: int, world_size: int) -> dict[str, Any]:
    """What comes of all ways, as a pipeline."""
    del rank, world_size
    return {name: trained(name, {}) for name in WAYS}


def with_dropout(rank: int, world_size: int) -> dict[str, State]:
    """The state after training with dropout, in two orders, one of them twice; every rank has a seed of its own."""
    del world_size
    found = {}
    for name, order in (("1F1B", "1f1b"), ("again", "1f1b"), ("GPipe", "gpipe")):
        model = nn.Sequential(*(nn.Sequential(each, nn.Dropout(0.5)) for each in layers()))
        torch.manual_seed(100 + rank)
        step = Step(model, sgd(model), {"order": order})
        plainly(step)
        found[name] = step.state()
    return found


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is raised where a module cannot become a pipeline."""
    del world_size

    def called(**given: Any) -> str:
        model = given.pop("model", None) or layers()
        loss_fn = given.pop("loss_fn", nn.functional.mse_loss)
        optimizer = given.pop("optimizer", sgd)(model)
        named = {"micro_batches": MICRO_BATCHES, **given.pop("strategy", {})}
        try:
            headway.parallelize(
                model, optimizer, headway.strategy("pipeline", **named), loss_fn=loss_fn, **given
            )
        except UserError as error:
            return str(error)
        return "nothing was raised"

    return {
        "no Sequential": called(model=nn.Linear(2, 2)),
        "no loss": called(loss_fn=None),
        "options of DDP": called(bucket_cap_mb=1),
        "few layers": called(model=layers(2)),
        "other models": called(model=layers(6 if rank else 8)),
        "strange points": called(strategy={"split_points": ("1", "head")}),
        "points in another order": called(strategy={"split_points": ("5", "1")}),
        "one point": called(strategy={"split_points": ("1",)}),
        "another optimizer": called(optimizer=lambda _: sgd(layers())),
    }
