"""What ranks do for the tests of ordinary modules as pipelines: train in many ways, and return the model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import headway
from headway.errors import UserError
from headway.plan import Plan
from headway.strategies.data_parallel.module_spec import model_spec
from headway.strategies.pipeline.mesh import MeshStrategy

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


def clipped_by_torch(step: Step) -> list[float]:
    """By torch's own function, which is given a stage's parameters."""
    said = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        said.append(float(nn.utils.clip_grad_norm_((step.pipelined or step.model).parameters(), 0.05)))
        step.optimizer.step()
    return said


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
    """An evaluation between steps, with a batch of another size too; it changes nothing."""
    said = []
    for number, (data, target) in enumerate(step.batches()):
        step.optimizer.zero_grad()
        said.append(step.train(data, target))
        step.optimizer.step()
        said.append(step.evaluate(data))
        if number == 1:
            said.append(step.evaluate(torch.cat([data, -data, 2 * data])))
    return said


def resumed(step: Step) -> list[float]:
    """The state of a model goes into it again."""
    losses = plainly(step)
    kept = step.whole_state()
    plainly(step)
    step.load(kept)
    return losses + plainly(step)


def from_a_checkpoint(step: Step) -> list[float]:
    """Another model goes on in another order, from the state of the model and the optimizer."""
    losses = plainly(step)
    kept, state = step.whole_state(), step.optimizer.state_dict()
    other = step.again(layers(seed=3), order="gpipe")
    other.load(kept)
    other.optimizer.load_state_dict(state)
    losses += plainly(other)
    step.load(other.whole_state())
    return losses


def clipped_by_value(step: Step) -> list[float]:
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        losses.append(step.train(data, target))
        step.clip_values(0.01)
        step.optimizer.step()
    return losses


def set_to_zero(step: Step) -> list[float]:
    """Gradients stay, as zeros."""
    losses = []
    for data, target in step.batches():
        step.optimizer.zero_grad(set_to_none=False)
        losses.append(step.train(data, target))
        step.optimizer.step()
    return losses


def in_parts(step: Step) -> list[float]:
    """Modules whose buffers are of what they see."""
    said = []
    for data, target in step.batches():
        step.optimizer.zero_grad()
        said.append(step.train_in_parts(data, target))
        step.optimizer.step()
        said.append(step.evaluate(data))
    return said


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


def frozen_to_begin_with() -> nn.Sequential:
    """Nothing of the first stage is trained."""
    model = layers(8)
    for number in range(4):
        model[number].requires_grad_(False)
    return model


def frozen_in_the_middle() -> nn.Sequential:
    """Nothing of the second stage is trained."""
    model = layers(8)
    model[2].requires_grad_(False)
    return model


def normed_by_batch() -> nn.Sequential:
    model = layers()
    model.insert(1, nn.BatchNorm1d(WIDTH).double())
    model.insert(5, nn.BatchNorm1d(WIDTH).double())
    return model


class Scaled(nn.Module):
    """Has a buffer that it uses, and one that it counts in."""

    scale: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.device.type == "cpu":
            self.seen += len(x)
        return x * self.scale


def with_buffers() -> nn.Sequential:
    model = layers()
    model.insert(3, Scaled())
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
    "from a checkpoint": (layers, adamw, from_a_checkpoint, {}),
    "clipping by torch": (layers, sgd, clipped_by_torch, {}),
    "clipping by value": (layers, sgd, clipped_by_value, {}),
    "gradients set to zero": (layers, momentum, set_to_zero, {}),
    "frozen first stage": (frozen_to_begin_with, sgd, plainly, {"split_points": ("4", "6")}),
    "frozen middle stage": (frozen_in_the_middle, sgd, plainly, {"split_points": ("2", "4")}),
    "batch norms": (normed_by_batch, sgd, in_parts, {}),
    "buffers": (with_buffers, sgd, in_parts, {}),
    "fewer micro-batches than stages": (layers, sgd, plainly, {"micro_batches": 2}),
    "single floats": (single_floats, adamw, plainly, {}),
}


SIDE_BY_SIDE = [name for name in WAYS if name != "zero-bubble"]


def trained(
    name: str,
    options: dict[str, Any] | None,
    mesh: DeviceMesh | None = None,
    pipelines: int = 1,
    ways: dict[str, Way] = WAYS,
    kind: type[Step] = Step,
) -> dict[str, Any]:
    """Losses, and the state at the end."""
    make, make_optimizer, way, given = ways[name]
    more: dict[str, Any] = {} if pipelines == 1 else {"mesh": mesh, "pipelines": pipelines}
    step = kind(make(), make_optimizer, None if options is None else {**given, **options}, **more)
    return {"said": way(step), "state": step.state()}


def in_every_way(rank: int, world_size: int) -> dict[str, Any]:
    """What comes of all ways, as a pipeline."""
    del rank, world_size
    return {name: trained(name, {}) for name in WAYS}


def side_by_side(
    rank: int, world_size: int, sizes: dict[str, int], data: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """What comes of ways ``names``, in pipelines side by side whose replicas do as ``data`` says."""
    del rank, world_size
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {name: trained(name, {"data": data} if data else {}, mesh, sizes["data"]) for name in names}


def with_dropout(rank: int, world_size: int) -> dict[str, State]:
    """The state after training with dropout, in two orders, one of them twice; every rank has a seed of its own."""
    del world_size
    found = {}
    for name, order in (("1F1B", "1f1b"), ("again", "1f1b"), ("GPipe", "gpipe")):
        model = nn.Sequential(*(nn.Sequential(each, nn.Dropout(0.5)) for each in layers()))
        torch.manual_seed(100 + rank)
        step = Step(model, sgd, {"order": order})
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

    def trains(act: Callable[[Step], Any]) -> str:
        step = Step(layers(), sgd, {})
        data, target = next(step.batches())
        try:
            step.train(data, target)
            act(step)
        except UserError as error:
            return str(error)
        return "nothing was raised"

    pair = (torch.zeros(2), torch.zeros(2))

    def clip(*given: Any) -> None:
        nn.utils.clip_grad_norm_(*given)

    return {
        "two targets": trains(lambda step: step.pipelined.train_step(pair[0], pair)),
        "a part is clipped": trains(lambda step: clip(next(step.pipelined.parameters()), 1.0)),
        "another norm": trains(lambda step: clip(step.pipelined.parameters(), 1.0, float("inf"))),
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


def refused_on_meshes(rank: int, world_size: int) -> dict[str, str]:
    """What is raised on meshes, with plans and by batches that do not fit; and what trains without a mesh."""
    order = headway.strategy("pipeline", micro_batches=2)
    split = headway.strategy("pipeline", micro_batches=2, split_points=("3",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    models = [model_spec(each) for each in (layers()[:3], layers()[3:])]
    composed = headway.strategy("mesh", pipeline=split, data=headway.strategy("ddp"))
    assert isinstance(composed, MeshStrategy)
    plan = Plan.on_mesh(composed, {"pipeline": 2, "data": 2}, models)

    def called(
        planned: Any, *sizes: tuple[int, int], mesh: Any = None, model: Any = None, late: Any = None
    ) -> str:
        model = model or layers()
        given = {} if mesh is None else {"mesh": mesh}
        loss_fn = None if planned.__class__.__name__ == "DecoupledStrategy" else nn.functional.mse_loss
        try:
            found: Any = headway.parallelize(model, sgd(model), planned, loss_fn=loss_fn, **given)
            for pair in sizes:
                batch = torch.ones(pair[rank // 2 if mesh is square else rank % 2], WIDTH).double()
                found.train_step(batch, batch)
                if late is not None:
                    late(found)
        except UserError as error:
            return str(error)
        return "trained"

    return {
        "other names": called(order, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))),
        "no names": called(order, mesh=init_device_mesh("cpu", (2, 2))),
        "fewer ranks": called(order, mesh=square["pipeline"]),
        "no mesh": called(order, mesh={"pipeline": 2, "data": 2}),
        "nothing said": called(headway.strategy("mesh", pipeline=order, data=headway.strategy("ddp"))),
        "three stages": called(headway.strategy("mesh", pipeline=THIRDS, data=headway.strategy("ddp"))),
        "halved backwards": called(HALVED, (8, 8), mesh=square),
        "no pipeline": called(headway.strategy("decoupled"), mesh=square),
        "another plan": called(plan, mesh=square),
        "a larger plan": called(Plan.on_mesh(composed, {"pipeline": 2, "data": 4}, models)),
        "a plan for another model": called(plan, model=layers(8)),
        "other sizes": called(order, (8, 4), mesh=square),
        "other sizes later": called(order, (8, 8), (8, 4), mesh=square),
        "frozen later": called(order, (8, 8), (8, 8), mesh=square, late=_freeze_first),
        "by its split points": called(composed, (8, 8)),
        "by its plan": called(plan, (8, 8)),
    }


THIRDS = headway.strategy("pipeline", micro_batches=2, split_points=("2", "4"))
HALVED = headway.strategy("pipeline", micro_batches=2, order="zero-bubble")


def _freeze_first(model: Any) -> None:
    for each in model.stage.parameters():
        each.requires_grad_(False)
