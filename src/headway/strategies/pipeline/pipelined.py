"""Trains an ordinary module as a pipeline: ``PipelinedModel`` holds this rank's stage of it.

The way of a micro-batch through the files::

    pipelined.py                      PipelinedModel.train_step(batch, target)
      |  torch: ScheduleGPipe.step splits the batch into micro-batches
    torch_private/pipelining.py       PipelineSteps: hands the step to our runtime instead of torch's order
      |
    runtime.py                        PipelineRuntime._step: carries out this rank's instructions one by one
      |                               StepWatch: notes when, if a tuner follows (tuning/)
    scheduling/pipeline/program.py    the instructions: Post, Await, Action, Send, Release; a replay uses the same
      |
    torch_private/pipelining.py       PipelineSteps.forward, .backward: torch's stage, loss and autograd
      |
    cutting.py                        TracedStage.forward; the children of a Sequential are called directly
      |
    dividing.py                       Program.run: this stage's share of the calls of the model's forward
      |
    pipelined.py                      gradients of shared parameters are summed, the loss is averaged over pipelines

``Placement`` says which stage of which pipeline a rank has, ``Replicas`` keeps the copies of a stage together.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import PlanError, UnsupportedError, UserError
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.live.reads import answer_clipping
from headway.strategies.pipeline import runtime
from headway.strategies.pipeline.cutting import Cut, TracedCut, cut, traced_cut
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.torch_private.pipelining import PipelineSteps, leave_to_torch, merge_outputs_by, tensors_in

_FORMS = f"the dimensions {PIPELINE} and {DATA}, or {PIPELINE} alone"


@dataclass(frozen=True)
class Placement:
    """This rank's position: job rank ``ranks[p][s]`` has stage ``s`` of pipeline ``p``.

    ``group`` holds the ranks of this pipeline in stage order, ``replicas`` the ranks with this stage (None for a single
    pipeline).
    """

    ranks: tuple[tuple[int, ...], ...]
    pipeline: int
    stage: int
    group: dist.ProcessGroup
    replicas: dist.ProcessGroup | None = None

    @property
    def stages(self) -> int:
        """The number of stages of each pipeline."""
        return len(self.ranks[0])

    @property
    def pipelines(self) -> int:
        """The number of pipelines."""
        return len(self.ranks)

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage == self.stages - 1

    @classmethod
    def of_all_ranks(cls) -> Placement:
        """One pipeline of all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return cls((tuple(range(dist.get_world_size())),), 0, dist.get_rank(), group)

    @classmethod
    def on(cls, mesh: DeviceMesh) -> Placement:
        """The position on ``mesh``, with the dimensions "pipeline" and "data" in either order, or "pipeline" alone.

        Raises UserError for other dimensions, or if it does not contain every rank exactly once.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if set(names) not in ({PIPELINE, DATA}, {PIPELINE}):
            raise UserError(
                "the mesh does not have the dimensions of a pipeline",
                got=", ".join(map(repr, names)) or "dimensions without names", expected=_FORMS,
                fix=f"Construct it with mesh_dim_names=({PIPELINE!r}, {DATA!r}).",
            )  # fmt: skip
        if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
            raise UserError(
                "the mesh must contain every rank exactly once", got=f"{mesh.mesh.numel()} ranks",
                expected=f"{dist.get_world_size()}",
            )  # fmt: skip
        by_pipeline = mesh.mesh.movedim(names.index(PIPELINE), -1).reshape(-1, mesh[PIPELINE].size())
        ranks = tuple(tuple(row) for row in by_pipeline.tolist())
        pipeline, stage = next(
            (p, rank.index(dist.get_rank())) for p, rank in enumerate(ranks) if dist.get_rank() in rank
        )
        replicas = mesh.get_group(DATA) if len(ranks) > 1 else None
        return cls(ranks, pipeline, stage, mesh.get_group(PIPELINE), replicas)


def placed(strategy: Strategy, mesh: object, planned: Mapping[str, int] | None, device: str) -> Placement:
    """Find this rank's position under ``strategy`` on ``mesh``, by default on ``planned``, the plan's mesh.

    Without either, all ranks form one pipeline, or for replicated pipelines ``split_points`` gives the number of
    stages. Collective. Raises UserError for an unsuitable mesh, PlanError if it differs from the plan's or the number
    of pipelines is unknown.
    """
    if mesh is not None:
        placement = Placement.on(_checked(mesh, planned))
    elif isinstance(strategy, MeshStrategy) or (planned is not None and len(planned) > 1):
        sizes = planned or _sizes_of(strategy)
        if math.prod(sizes.values()) != dist.get_world_size():
            raise PlanError(
                "the plan is for another world size",
                got=f"{dist.get_world_size()} workers",
                expected=_describe(sizes),
            )
        placement = Placement.on(init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    else:
        placement = Placement.of_all_ranks()
    return placement


def _checked(mesh: object, planned: Mapping[str, int] | None) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise UserError(
            "mesh must be a DeviceMesh", got=type(mesh).__name__, expected="a torch.distributed.DeviceMesh",
            fix="Construct it with torch.distributed.device_mesh.init_device_mesh.",
        )  # fmt: skip
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if planned is not None and list(sizes.items()) != list(planned.items()):
        raise PlanError("the mesh differs from the plan's", got=_describe(sizes), expected=_describe(planned))
    return mesh


def _sizes_of(strategy: Strategy) -> dict[str, int]:
    """A mesh with one stage per split point, plus one, and as many pipelines as ranks allow."""
    assert isinstance(strategy, MeshStrategy)
    ranks, points = dist.get_world_size(), strategy.pipeline.split_points
    stages = 1 + len(points)
    if not points or ranks % stages:
        raise PlanError(
            "cannot tell which ranks form a pipeline and which share a stage",
            got=f"{ranks} ranks" + (f" and {stages} stages" if points else ""), expected=f"a mesh of {_FORMS}",
            fix="Call headway.parallelize(…, mesh=mesh).",
        )  # fmt: skip
    return {PIPELINE: stages, DATA: ranks // stages}


def _describe(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{size} {name}" for name, size in mesh.items()) or "dimensions without names"


Replicate = Callable[[nn.Module, dist.ProcessGroup], nn.Module]
"""Wraps a stage so that it averages gradients with the ranks of a group."""


class Replicas:
    """Keeps this rank's stage consistent with its replicas; ``wrapped`` is the stage as wrapped by ``replicate``.

    A stage without replicas or without trainable parameters is not wrapped.
    """

    def __init__(
        self, stage: nn.Module, placement: Placement, replicate: Replicate | None, device: torch.device
    ) -> None:
        self._stage, self._place, self._device = stage, placement, device
        self._trained = self._trainable()
        self.wrapped = stage
        if placement.replicas is not None and self._trained:
            assert replicate is not None, "replicas average gradients"
            self.wrapped = replicate(stage, placement.replicas)

    def begin_step(self, samples: int) -> None:
        """Check a training step; collective. ``samples`` is the number of samples that this rank passes to its pipeline.

        Raises UserError on every rank if pipelines have different numbers of samples (the mean over pipelines would not
        be the mean over samples), or if the set of trainable parameters changed since the stage was wrapped.
        """
        if self._place.replicas is None:
            return
        if changed := self._trainable() ^ self._trained:
            raise UserError(
                "the set of trainable parameters changed after headway.parallelize",
                got=f"requires_grad of {', '.join(sorted(changed)[:4])} was changed",
                fix="Freeze parameters before headway.parallelize, or call it again on a new model.",
            )
        counts = torch.zeros(self._place.pipelines, dtype=torch.int64, device=self._device)
        counts[self._place.pipeline] = samples
        dist.all_reduce(counts)
        sample_counts = counts.tolist()
        if len(set(sample_counts)) > 1:
            raise UserError(
                "pipelines received batches of different sizes",
                got=", ".join(f"{count} samples" for count in sample_counts),
                expected="the same number of samples for every pipeline",
                fix="Give every pipeline an equal share of the batch (drop_last=True in a DataLoader).",
            )
        self.share_buffers()

    def share_buffers(self) -> None:
        """Broadcast the first pipeline's buffers to every replica, as DistributedDataParallel does before a forward."""
        if self._place.replicas is None:
            return
        with torch.no_grad():
            for buffer in self._stage.buffers():
                dist.broadcast(buffer, self._place.ranks[0][self._place.stage], group=self._place.replicas)

    def mean_of(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over pipelines of ``loss``, which only last stages know; returned on every rank."""
        total = loss if self._place.is_last else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total / self._place.pipelines

    def _trainable(self) -> frozenset[str]:
        return frozenset(
            name for name, parameter in self._stage.named_parameters() if parameter.requires_grad
        )


T = TypeVar("T")


def first_differing_rank(description: str, device: torch.device) -> int | None:
    """The first rank whose ``description`` differs from rank 0's, or None. Collective."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(description.encode()).digest()), dtype=torch.int64).to(
        device
    )
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return next(
        (rank for rank, rank_digest in enumerate(digests) if not torch.equal(rank_digest, digests[0])), None
    )


def made_alike(what: str, make: Callable[[], T], describe: Callable[[T], str], device: torch.device) -> T:
    """Returns ``make()``. Raises UserError on all ranks if it raises on one, or if results differ. Collective.

    Results are compared by ``describe``. ``what`` is the error on ranks that did not fail themselves.
    """
    failure: UserError | None = None
    try:
        result = make()
        outcome = f"made {describe(result)}"
    except UserError as error:
        failure, outcome = error, f"refused {error}"
    differing_rank = first_differing_rank(outcome, device)
    if failure is not None:
        raise failure
    if differing_rank is not None:
        raise UserError(
            what,
            got=f"an error or another result on rank {differing_rank} or rank 0",
            fix="See the error of that rank.",
        )
    return result


class Evaluation:
    """Evaluates batches with stages from ``make_stage``, in at most ``micro_batches`` equal parts.

    ``group`` holds the ranks of the pipeline in stage order; all of them make the same calls.
    """

    def __init__(
        self,
        make_stage: Callable[[], PipelineStage],
        micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._make_stage, self._most = make_stage, micro_batches
        self._group, self._device = group, device
        self._samples = 0
        self._schedule: ScheduleGPipe | None = None

    def of(self, inputs: tuple[Any, ...]) -> Any:
        """The model's output on the rank of the last stage, None elsewhere. Only the first stage uses ``inputs``."""
        first = dist.get_rank(self._group) == 0
        samples = torch.tensor([inputs[0].shape[0] if first else 0], device=self._device)
        dist.broadcast(samples, group=self._group, group_src=0)
        if self._schedule is None or int(samples) != self._samples:
            self._samples = int(samples)
            # torch keeps shapes, so another batch size needs another schedule.
            self._schedule = ScheduleGPipe(self._make_stage(), self._parts())
            leave_to_torch(self._schedule)
            merge_outputs_by(self._schedule, _merged)
        return self._schedule.eval(*(inputs if first else ()))

    def _parts(self) -> int:
        return max(count for count in range(1, self._most + 1) if self._samples % count == 0)


def _merged(parts: Sequence[Any]) -> Any:
    """Merge one output tensor of all parts: concatenates samples, averages scalars such as a loss."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if parts[0].dim():
        return torch.cat([*parts])
    if not parts[0].is_floating_point():
        raise UnsupportedError(
            "the model returns a scalar that is not a mean, which micro-batches cannot combine",
            got=f"a tensor without dimensions of {parts[0].dtype}", expected="tensors with a batch dimension, or a loss",
            fix="Return the tensors from which the scalar is computed.",
        )  # fmt: skip
    return torch.stack([*parts]).mean()


class Clips(Protocol):
    """A model whose stages clip gradients together."""

    @property
    def own_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of this rank's stage."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by their norm over all stages."""


_models: weakref.WeakSet[Clips] = weakref.WeakSet()


def watch_clipping(model: Clips) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` use the norm over all stages for the parameters of ``model``."""
    _models.add(model)
    answer_clipping(_clipped, whole=True)  # replicas know the norm of a stage alone


def _clipped(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, _error_if_nonfinite: bool
) -> torch.Tensor | None:
    """Clip and return the norm over all stages; None for other parameters. Raises UnsupportedError for a subset."""
    ids = {id(parameter) for parameter in parameters}
    for model in list(_models):
        stage_ids = {id(parameter) for parameter in model.own_parameters}
        if stage_ids.isdisjoint(ids):
            continue
        if norm_type != 2 or stage_ids != ids:
            raise UnsupportedError(
                "a pipeline clips gradients only by the 2-norm of all of them",
                got=f"{len(stage_ids & ids)} of the {len(stage_ids)} parameters of this stage, norm_type={norm_type:g}",
                fix="Call model.clip_grad_norm_(max_norm).",
            )
        return model.clip_grad_norm_(max_norm)
    return None


Loss = Callable[[Any, Any], torch.Tensor]


class PipelinedModel(nn.Module):
    """This rank's stage of a model, trained as part of a pipeline; all ranks make the same calls.

    ``stage`` holds the stage's modules under their original names. Parameters and buffers start from rank 0's values.
    ``optimizer`` keeps only this stage's parameters. Drop references to the original model: it holds all stages.
    Modules other than ``torch.nn.Sequential`` need an ``example`` batch (``cutting.traced_cut``).

    On a mesh, every pipeline trains on its own batch, and ``replicate`` wraps the stage so that its replicas average
    gradients. ``placement`` is this rank's position; by default all ranks form one pipeline.

    Raises UserError or PlanError if the loss or the number of micro-batches is missing or the model cannot be split;
    UnsupportedError for a device whose tensors the process group cannot send.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: PipelineStrategy,
        loss_fn: Loss | None,
        example: Any = None,
        *,
        placement: Placement | None = None,
        replicate: Replicate | None = None,
    ) -> None:
        super().__init__()
        if not callable(loss_fn):
            raise UserError(
                "a pipeline needs a loss function for its last stage", got=f"loss_fn={loss_fn!r}",
                expected="a function of the model's output and the target",
                fix="Call headway.parallelize(model, optimizer, plan, loss_fn=…).",
            )  # fmt: skip
        self._micro_batches = strategy.count()
        self._place = placement or Placement.of_all_ranks()
        self._rank, self._ranks = self._place.stage, self._place.stages  # of this pipeline
        state = {
            name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)
        }
        self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
        self._device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        _check_alike(self._like, self._device)
        _check_messages(self._device, self._place.group)
        self._cut = self._agreed_cut(model, strategy.split_points, example)
        self._have_begun = False
        self._targeted = True
        for tensor in state.values():
            dist.broadcast(tensor, 0)
        self.stage = self._cut.module(model, self._rank)
        self._loss_fn = loss_fn
        self._shared = self._shared_parameters()
        _keep(optimizer, self.stage)
        self._replicas = Replicas(self.stage, self._place, replicate, self._device)
        self._schedule = ScheduleGPipe(
            self._made_stage(self._replicas.wrapped),
            self._micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self._evaluation = Evaluation(
            partial(self._made_stage, self.stage), self._micro_batches, self._place.group, self._device
        )
        self.steps = PipelineSteps(self._schedule)
        watch_clipping(self)

    def _made_stage(self, module: nn.Module) -> PipelineStage:
        arguments = self._cut.arguments(self._rank)
        return PipelineStage(
            module, self._rank, self._ranks, self._device, group=self._place.group, **arguments
        )

    def forward(self, *_: Any) -> torch.Tensor:
        """Raise UserError: a rank holds only one stage."""
        raise UserError(
            "a pipeline stage cannot be called like the whole model",
            got="model(batch)",
            expected="model.train_step(batch, target), or model.evaluate(batch)",
        )

    @runtime.among("a step")
    def train_step(self, batch: Any, target: torch.Tensor | None) -> torch.Tensor:
        """Run forward and backward of one batch in micro-batches; returns the mean loss on every rank.

        Only the first stage uses ``batch``, of shape (samples, …), and only the last stage ``target``. Pass None as
        ``target`` for a model that returns its own loss: ``loss_fn(output, None)`` then extracts it. Pass several inputs
        as a tuple, or as a dict of keyword arguments. The loss is the mean over all pipelines. Gradients accumulate, as
        with ``backward``. Raises UserError if the batch does not split evenly or pipelines have different batch sizes.
        """
        if not isinstance(target, torch.Tensor | None):
            raise UnsupportedError(
                "the target of a pipeline must be a single tensor", got=type(target).__name__,
                expected="a tensor with the batch's first dimension",
                fix="Stack the targets along another dimension and split them in loss_fn.",
            )  # fmt: skip
        inputs = self._inputs(batch, in_agreement=not self._have_begun)
        self._have_begun = True
        samples = tensors_in(inputs)[0].shape[0] if self._rank == 0 else 0
        self._replicas.begin_step(samples)
        losses: list[torch.Tensor] = []
        # Gradients of earlier batches have been added up among stages already.
        earlier = [(parameter, parameter.grad) for parameter, _ in self._shared if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        if self._rank == 0:
            self._schedule.step(*inputs)
        elif self._rank == self._ranks - 1:
            self._targeted = target is not None
            if target is None:
                target = torch.zeros(self._micro_batches, device=self._device)  # torch wants one to split
            self._schedule.step(target=target, losses=losses, return_outputs=False)
        else:
            self._schedule.step()
        self._sum_shared()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        loss = torch.stack([part.detach() for part in losses]).sum() if losses else torch.zeros(())
        return self._replicas.mean_of(loss.to(self._device, torch.float64))

    @runtime.among("an evaluation")
    def evaluate(self, batch: Any) -> Any:
        """The model's output for ``batch`` on the last rank of each pipeline, None elsewhere; without gradients.

        Raises UnsupportedError if the stages of a traced model exchange different tensors in evaluation than in training.
        """
        if self._cut.not_evaluated:
            raise UnsupportedError("cannot evaluate this model as a pipeline", got=self._cut.not_evaluated)
        inputs = self._inputs(batch, in_agreement=True)
        self._replicas.share_buffers()
        modes = [(module, module.training) for module in self.stage.modules()]
        self.stage.eval()
        try:
            with torch.no_grad():
                output = self._evaluation.of(inputs)
                return self._cut.output(output, training=False) if self._rank == self._ranks - 1 else None
        finally:
            for module, training in modes:
                module.training = training

    def _agreed_cut(self, model: nn.Module, points: Sequence[str], example: Any) -> Cut | TracedCut:
        """Split the model, the same way on all ranks. Raises UserError on every rank if it fails on one."""

        def cut_it() -> Cut | TracedCut:
            if example is None:
                return cut(model, self._ranks, points)
            return traced_cut(model, self._ranks, points, example, self._micro_batches, self._device)

        return made_alike(
            "ranks disagree about how to split the model into stages",
            cut_it,
            lambda model_cut: model_cut.signature(),
            self._device,
        )

    def _inputs(self, batch: Any, *, in_agreement: bool) -> tuple[torch.Tensor, ...]:
        """The input tensors of the first stage. Raises UserError for a batch that does not match the example."""
        if not isinstance(self._cut, TracedCut):
            return (batch,)
        traced = self._cut
        traced.check(self.stage)

        def of_batch() -> tuple[torch.Tensor, ...]:
            return traced.inputs(batch, self._micro_batches) if self._rank == 0 else ()

        if not in_agreement:
            return of_batch()
        return made_alike("ranks disagree about the batch", of_batch, lambda _: "", self._device)

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        # Not by torch, which divides all gradients after the last backward: accumulated ones a second time, and those
        # of replicas before they are reduced.
        own_target = target if self._targeted else None
        loss = self._loss_fn(self._cut.output(output, training=self.stage.training), own_target)
        return loss / self._micro_batches

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stage."""
        return list(self.stage.parameters())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their 2-norm over all stages is at most ``max_norm``; returns the norm before."""
        counted_elsewhere = {id(parameter) for parameter, (first, _) in self._shared if first != self._rank}
        parameters = [parameter for parameter in self.stage.parameters() if parameter.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in parameters:
            if id(parameter) not in counted_elsewhere:
                assert parameter.grad is not None
                square += parameter.grad.double().norm() ** 2
        dist.all_reduce(square, group=self._place.group)
        norm = square.sqrt()
        scale = float(max_norm / (norm + 1e-6))
        if scale < 1:
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The ``state_dict`` of the whole model, on every rank."""
        stage_state = self.stage.state_dict()
        full_state = {}
        for name, like in self._like.items():
            stage = self._cut.stages_of(name)[0]
            value = (
                stage_state[name].detach().clone()
                if stage == self._rank and self._place.pipeline == 0
                else torch.empty_like(like, device=self._device)
            )
            dist.broadcast(value, self._place.ranks[0][stage])
            full_state[name] = value
        return full_state

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a whole model's state. Raises UserError for the state of another model."""
        if state.keys() != self._like.keys():
            unmatched = sorted(state.keys() ^ self._like.keys())
            raise UserError(
                "the state dict belongs to another model", got=f"{', '.join(unmatched[:4])} on one side only"
            )
        self.stage.load_state_dict({name: state[name] for name in self.stage.state_dict()})

    # Parameters that several stages have -----------------------------------------------------------------

    def _shared_parameters(self) -> list[tuple[nn.Parameter, tuple[int, dist.ProcessGroup | None]]]:
        """This rank's parameters that other stages share, with the first such stage and the group of all of them."""
        by_name = dict(self.stage.named_parameters(remove_duplicate=False))
        shared = []
        for names in self._cut.tied:
            stages = sorted({stage for name in names for stage in self._cut.stages_of(name)})
            if len(stages) == 1:
                continue
            ranks = [[rank[stage] for stage in stages] for rank in self._place.ranks]
            world = dist.group.WORLD
            assert world is not None
            timeout = torch_private.group_timeout(world)
            groups = [dist.new_group(members, timeout) for members in ranks]
            if self._rank in stages:
                group = groups[self._place.pipeline]
                shared.append((next(by_name[name] for name in names if name in by_name), (stages[0], group)))
        return shared

    def _sum_shared(self) -> None:
        for parameter, (_, group) in self._shared:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)


def _check_alike(like: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise UserError unless all ranks have a model with these names, shapes and dtypes."""
    rank = first_differing_rank(
        repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()]), device
    )
    if rank is not None:
        raise UserError(
            "ranks constructed different models",
            got=f"names, shapes or dtypes on rank {rank} that differ from rank 0",
            expected="the same model on every rank; each rank keeps its stage of it",
        )


def _keep(optimizer: Optimizer, stage: nn.Module) -> None:
    """Remove all parameters but those of ``stage`` from an optimizer; groups keep their options and order."""
    kept = {id(parameter) for parameter in stage.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
    for parameter in [held for held in optimizer.state if id(held) not in kept]:
        del optimizer.state[parameter]


def _check_messages(device: torch.device, group: dist.ProcessGroup | None) -> None:
    within = dist.group.WORLD if group is None else group
    assert within is not None
    backends = torch_private.backends_of(within)
    listed = ", ".join(f"{backend} for {kind}" for kind, backend in sorted(backends.items()))
    if device.type != "cpu" and backends.get(device.type) in (None, "gloo"):
        raise UnsupportedError(
            "the process group cannot send tensors between stages",
            got=f"a model on {device}, {listed}",
            expected="NCCL for CUDA; Gloo only sends CPU tensors",
            fix="Call init_process_group('cpu:gloo,cuda:nccl').",
        )  # fmt: skip
