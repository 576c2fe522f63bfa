"""What ranks do for the tests of traced modules as pipelines: a GPT and a ResNet, trained in many ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from tests.behaviour import pipelined_cases as plain
from tests.behaviour import pipelined_training as training
from tests.behaviour.pipelined_cases import Way
from tests.behaviour.pipelined_models import adamw, momentum, sgd
from tests.behaviour.pipelined_step import Step as PlainStep
from tests.traced_models import GPT, LENGTH, GPTConfig, ResNet, images, made, tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import headway
from headway.errors import UserError

MICRO_BATCHES, ROWS = 4, 3
BATCH = MICRO_BATCHES * ROWS


class Step(PlainStep):
    """One process trains micro-batch by micro-batch: batch norm sees them."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Any,
        options: dict[str, Any] | None,
        mesh: DeviceMesh | None = None,
        pipelines: int = 1,
    ) -> None:
        self.kind: Callable[[int, int], Any] = images if isinstance(model, ResNet) else tokens
        if isinstance(model, GPTWithLoss):
            self.kind = with_targets
        elif (options is not None and options.pop("masked", False)) or getattr(model, "masked", False):
            self.kind = masked
        self.example = self._like(model, self.kind(BATCH, 0))
        super().__init__(model, make_optimizer, options, mesh, pipelines)

    @staticmethod
    def _like(model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor) and batch.is_floating_point():
            return batch.to(next(model.parameters()).dtype)
        return batch

    def batches(self, steps: int = 3) -> Iterator[tuple[Any, torch.Tensor]]:
        rows = self.pipelines * BATCH
        for seed in range(steps):
            targets = tokens(rows, 50 + seed)
            yield self.kind(rows, seed), targets[:, 0] if self.kind is images else targets

    def loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        if isinstance(output, dict):
            loss: torch.Tensor = output["loss"]
            return loss
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    def train(self, data: Any, target: torch.Tensor) -> float:
        data = self._like(self.model, data)
        if self.pipelined is not None:
            return float(self.pipelined.train_step(self.own_part(data), self.given_target(self.own(target))))
        losses, kept = [], list[torch.Tensor]()
        for at in range(0, self.pipelines * BATCH, ROWS):
            if at == BATCH:  # buffers are those of the first pipeline
                kept = [each.clone() for each in self.model.buffers()]
            loss = self.loss(self._output(data, slice(at, at + ROWS)), target[at : at + ROWS])
            (loss / (self.pipelines * MICRO_BATCHES)).backward()
            losses.append(loss.detach().double())
        for buffer, value in zip(self.model.buffers(), kept, strict=False):
            buffer.copy_(value)
        return float(torch.stack(losses).mean())

    def own_part(self, data: Any) -> Any:
        """That of this rank's pipeline."""
        return (
            {name: self.own(each) for name, each in data.items()}
            if isinstance(data, dict)
            else self.own(data)
        )

    def given_target(self, target: torch.Tensor) -> torch.Tensor | None:
        """What a pipeline's last rank is given: nothing where the model computes its loss itself."""
        return None if self.kind is with_targets else target

    def _output(self, data: Any, rows: slice) -> torch.Tensor:
        if isinstance(data, dict):
            found: torch.Tensor = self.model(**{name: each[rows] for name, each in data.items()})
        else:
            found = self.model(data[rows])
        return found

    def evaluate(self, data: Any) -> float:
        """A number that comes of the output of an evaluation, on every rank."""
        data = self._like(self.model, data)
        if self.pipelined is None:
            self.model.eval()
            with torch.no_grad():
                output = self._output(data, slice(None))
            self.model.train()
            return self.said_of(output)
        output = self.pipelined.evaluate(self.own_part(data))
        said = torch.tensor(0.0 if output is None else self.said_of(output), dtype=torch.float64)
        dist.all_reduce(said)
        return float(said)

    def said_of(self, output: Any) -> float:
        """A number that tells outputs apart, and adds up over pipelines."""
        if isinstance(output, dict):
            return self.said_of(output["logits"]) + float(output["loss"])
        return float(output.double().square().sum())


def masked(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Sentences of unequal lengths."""
    lengths = torch.arange(rows)[:, None] % LENGTH + 1
    return {"idx": tokens(rows, seed), "attention_mask": torch.arange(LENGTH)[None] < lengths}


def with_targets(rows: int, seed: int) -> dict[str, torch.Tensor]:
    """What a model that computes its loss is given."""
    return {"idx": tokens(rows, seed), "targets": tokens(rows, 50 + seed)}


def evaluated(step: PlainStep) -> list[float]:
    """Outputs of evaluations, before and between steps."""
    assert isinstance(step, Step)
    said = []
    for data, target in step.batches():
        said.append(step.evaluate(data))
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        step.optimizer.step()
    return said


class GPTWithLoss(GPT):
    """It computes its loss itself where it is given targets."""

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits = super().forward(idx)
        assert targets is not None
        return {
            "logits": logits,
            "loss": nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten()),
        }


def gpt_with_loss() -> nn.Module:
    return made(GPTWithLoss)


def gpt(**config: Any) -> Callable[[], nn.Module]:
    return lambda: made(lambda: GPT(GPTConfig(**config)))


def masked_gpt() -> nn.Module:
    model = made(GPT)
    model.masked = True  # type: ignore[assignment]
    return model


def single_gpt() -> nn.Module:
    return made(GPT).float()


def frozen_gpt() -> nn.Module:
    """Nothing of the first stage is trained."""
    model = made(GPT)
    assert isinstance(model, GPT)
    for each in (
        model.transformer["wte"],
        model.transformer["wpe"],
        model.transformer["h"].get_submodule("0"),
    ):
        each.requires_grad_(False)
    return model


def resnet() -> nn.Module:
    return made(ResNet)


AT = ("transformer.h.1", "transformer.h.3")
LAYERS = ("layer2", "layer3")
GROUPS = {"order": "kfkb", "group_size": 2}
# Not Adam for a GPT: keys' biases have gradients of rounding errors alone, which it makes as large as others.

WAYS: dict[str, Way] = {
    "GPT": (gpt(), sgd, training.plainly, {"split_points": AT, **GROUPS}),
    "GPT, GPipe": (gpt(), sgd, training.plainly, {"split_points": AT, "order": "gpipe"}),
    "GPT, zero-bubble": (gpt(), momentum, training.plainly, {"split_points": AT, "order": "zero-bubble"}),
    "GPT, balanced": (gpt(), momentum, training.plainly, {}),
    "GPT, inside blocks": (
        gpt(), sgd, training.plainly, {"split_points": ("transformer.h.0.mlp", "transformer.h.2.attn")},
    ),
    "GPT, pipe_split": (gpt(splits=True), sgd, training.plainly, GROUPS),
    "GPT, masks": (masked_gpt, sgd, training.plainly, {"split_points": AT, **GROUPS}),
    "GPT, masks, zero-bubble": (masked_gpt, sgd, training.plainly, {"split_points": AT, "order": "zero-bubble"}),
    "GPT, checkpoints": (gpt(checkpoints=True), sgd, training.plainly, {"split_points": AT}),
    "GPT, clipped": (gpt(), sgd, training.clipped, {"split_points": AT}),
    "GPT, accumulated": (gpt(), momentum, training.accumulated, {"split_points": AT}),
    "GPT, resumed": (gpt(), sgd, training.resumed, {"split_points": AT}),
    "GPT, evaluated": (gpt(), sgd, evaluated, {"split_points": AT, **GROUPS}),
    "GPT, frozen": (frozen_gpt, sgd, training.plainly, {"split_points": AT}),
    "GPT, mixed precision": (single_gpt, sgd, training.plainly, {"split_points": AT}),
    "ResNet": (resnet, momentum, evaluated, {"split_points": LAYERS, **GROUPS}),
    "ResNet, zero-bubble": (resnet, sgd, evaluated, {"split_points": LAYERS, "order": "zero-bubble"}),
    "ResNet, balanced": (resnet, adamw, evaluated, {"order": "gpipe"}),
    "GPT, its own loss": (gpt_with_loss, sgd, evaluated, {"split_points": AT, **GROUPS}),
    "ResNet, in place": (resnet, sgd, evaluated, {"split_points": ("relu", "layer3.0.relu"), **GROUPS}),
    "ResNet, in place, zero-bubble": (
        resnet, sgd, evaluated, {"split_points": ("relu", "layer3"), "order": "zero-bubble"},
    ),
    "ResNet, inside a block": (resnet, sgd, evaluated, {"split_points": ("layer1.1", "layer2.0.conv2")}),
}  # fmt: skip

ON_TWO: dict[str, Way] = {
    "GPT": (gpt(), momentum, evaluated, {"split_points": ("transformer.h.2",), **GROUPS}),
    "GPT, zero-bubble": (masked_gpt, sgd, training.clipped, {"order": "zero-bubble"}),
    "ResNet": (resnet, sgd, evaluated, {"split_points": ("layer3",), "order": "gpipe"}),
}  # fmt: skip


SIDE_BY_SIDE: dict[str, Way] = {
    "GPT": (gpt(), sgd, evaluated, {"split_points": ("transformer.h.2",), **GROUPS}),
    "GPT, masks": (masked_gpt, momentum, training.accumulated, {"order": "eager-1f1b"}),
    "GPT, clipped": (gpt(), sgd, training.clipped, {"split_points": ("transformer.h.1.mlp",)}),
    "GPT, its own loss": (gpt_with_loss, sgd, training.plainly, {"split_points": ("transformer.h.3",)}),
    "GPT, decoupled": (
        gpt(), sgd, training.plainly,
        {"split_points": ("transformer.h.2",), "data": {"name": "decoupled", "gather": "gradients"}},
    ),
    "ResNet": (resnet, sgd, training.plainly, {"split_points": ("layer3.0.relu",), **GROUPS}),
}  # fmt: skip


def trained(
    name: str,
    options: dict[str, Any] | None,
    ways: dict[str, Way] = WAYS,
    mesh: DeviceMesh | None = None,
    pipelines: int = 1,
) -> dict[str, Any]:
    """Losses, and the state at the end."""
    with torch.autocast("cpu", torch.bfloat16, enabled="mixed" in name):
        return plain.trained(name, options, mesh, pipelines, ways=ways, kind=Step)


def in_every_way(rank: int, world_size: int) -> dict[str, Any]:
    """What comes of all ways, as a pipeline."""
    del rank
    ways = WAYS if world_size == 3 else ON_TWO
    return {name: trained(name, {}, ways) for name in ways}


def side_by_side(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, Any]:
    """The same in two pipelines side by side."""
    del rank, world_size
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {
        name: trained(
            name, {"data": {"name": "ddp"}, **SIDE_BY_SIDE[name][3]}, SIDE_BY_SIDE, mesh, sizes["data"]
        )
        for name in SIDE_BY_SIDE
    }


def with_dropout(rank: int, world_size: int) -> dict[str, Any]:
    """Training with dropout, in three orders, one of them twice; every rank has a seed of its own.

    ``evaluated`` are two evaluations of the last, and that of one process that has loaded its state.
    """
    del world_size
    found: dict[str, Any] = {}
    for name, order in (
        ("1F1B", "1f1b"),
        ("again", "1f1b"),
        ("GPipe", "gpipe"),
        ("zero-bubble", "zero-bubble"),
    ):
        model = gpt(dropout=0.3)()
        torch.manual_seed(100 + rank)
        step = Step(model, sgd, {"order": order, "split_points": AT})
        training.plainly(step)
        found[name] = step.state()
    whole = gpt(dropout=0.3)()
    whole.load_state_dict(step.pipelined.full_state_dict())
    alone = Step(whole, sgd, None)
    data = tokens(BATCH, 9)
    found["evaluated"] = [step.evaluate(data), step.evaluate(data), alone.evaluate(data)]
    return found


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is raised on each rank where a model, an example or a batch does not fit."""
    del world_size
    example = tokens(BATCH)

    def called(
        model: nn.Module | None = None, example: Any = example, points: tuple[str, ...] = AT,
        then: Callable[[Any], Any] = lambda _: "nothing was raised",
    ) -> str:  # fmt: skip
        model = model or made(GPT)
        planned = headway.strategy("pipeline", micro_batches=MICRO_BATCHES, split_points=points)
        try:
            pipelined = headway.parallelize(
                model, sgd(model), planned, loss_fn=nn.functional.cross_entropy, example_batch=example
            )
            return str(then(pipelined))
        except UserError as error:
            return str(error)

    def in_autocast(pipelined: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return pipelined.train_step(example, example)

    def unfrozen(pipelined: Any) -> Any:
        pipelined.stage.requires_grad_(False)
        return pipelined.train_step(example, example)

    return {
        "other examples": called(example=tokens(BATCH * (1 + (rank == 1)))),
        "one rank alone": called(example=tokens(BATCH + (rank == 2))),
        "unknown point": called(points=("transformer.h.1", "transformr.h.2")),
        "one point short": called(points=("transformer.h.1",)),
        "another batch": called(then=lambda each: each.train_step(tokens(2 * BATCH), example)),
        "another batch in evaluation": called(then=lambda each: each.evaluate(tokens(2 * BATCH))),
        "autocast": called(then=in_autocast),
        "unfrozen": called(then=unfrozen),
        "many inputs": called(then=lambda each: each.train_step((example, example), example)),
    }  # fmt: skip
