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
from headway.torch_private.pipelining import PipelineSteps, left_to_torch, merge_outputs_by, tensors_in

_FORMS = f"the dimensions {PIPELINE} and {DATA}, or {PIPELINE} alone"


@dataclass(frozen=True)
class Placement:
    """``ranks[p][s]`` is the rank of the job that has stage ``s`` of pipeline ``p``; every rank has one.

    ``group`` has the ranks of this pipeline in the order of stages, ``replicas`` those of this stage; None where there
    is one pipeline.
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
        """That on ``mesh``, whose dimensions are named "pipeline" and "data", in either order, or "pipeline" alone.

        Raises UserError for one of other dimensions, and where it does not have every rank of the job once.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if set(names) not in ({PIPELINE, DATA}, {PIPELINE}):
            raise UserError(
                "the mesh has other dimensions than pipelines have",
                got=", ".join(map(repr, names)) or "dimensions without names", expected=_FORMS,
                fix=f"Construct it with mesh_dim_names=({PIPELINE!r}, {DATA!r}).",
            )  # fmt: skip
        if sorted(mesh.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
            raise UserError(
                "the mesh does not have every rank of the job", got=f"{mesh.mesh.numel()} ranks",
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
    """Where this rank is under ``strategy``: on ``mesh``; without one on ``planned``, the mesh of a plan.

    Where there is neither, one pipeline has all ranks, and ``split_points`` say how many stages those side by side
    have. Every rank calls it. Raises UserError for a mesh that no pipelines are on, PlanError where it is not the
    planned one, and where nothing says how many pipelines there are.
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
            "mesh is no mesh", got=type(mesh).__name__, expected="a torch.distributed.DeviceMesh",
            fix="Construct it with torch.distributed.device_mesh.init_device_mesh.",
        )  # fmt: skip
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if planned is not None and list(sizes.items()) != list(planned.items()):
        raise PlanError(
            "the mesh is not the one that the plan is for", got=_describe(sizes), expected=_describe(planned)
        )
    return mesh


def _sizes_of(strategy: Strategy) -> dict[str, int]:
    """The stages that are named, and as many pipelines of them as there are ranks for."""
    assert isinstance(strategy, MeshStrategy)
    ranks, points = dist.get_world_size(), strategy.pipeline.split_points
    stages = 1 + len(points)
    if not points or ranks % stages:
        raise PlanError(
            "nothing says which ranks are a pipeline, and which have the same stage",
            got=f"{ranks} ranks" + (f" and {stages} stages" if points else ""), expected=f"a mesh of {_FORMS}",
            fix="Call headway.parallelize(…, mesh=mesh).",
        )  # fmt: skip
    return {PIPELINE: stages, DATA: ranks // stages}


def _describe(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{size} {name}" for name, size in mesh.items()) or "dimensions without names"


Replicate = Callable[[nn.Module, dist.ProcessGroup], nn.Module]
"""Wraps a stage, so that it averages gradients with the other ranks of a group."""


class Replicas:
    """This rank's ``stage`` among its replicas, ``wrapped`` by what ``replicate`` makes of it; alone it stays as it is.

    A stage none of whose parameters are trained has no gradients to average.
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
        """Every rank calls it before a step that trains, with how many ``samples`` it gives its pipeline.

        Raises UserError on every rank where pipelines are given other numbers: a mean over pipelines is that over
        samples only where each has as many. Raises it too where other parameters are trained than when the stage was
        wrapped, which replicas would not average.
        """
        if self._place.replicas is None:
            return
        if changed := self._trainable() ^ self._trained:
            raise UserError(
                "other parameters are trained than when the model was parallelized",
                got=f"requires_grad of {', '.join(sorted(changed)[:4])} was changed",
                fix="Freeze parameters before headway.parallelize, or call it again on a new model.",
            )
        counts = torch.zeros(self._place.pipelines, dtype=torch.int64, device=self._device)
        counts[self._place.pipeline] = samples
        dist.all_reduce(counts)
        sample_counts = counts.tolist()
        if len(set(sample_counts)) > 1:
            raise UserError(
                "pipelines were given batches of other sizes",
                got=", ".join(f"{count} samples" for count in sample_counts),
                expected="as many samples for each pipeline",
                fix="Give every pipeline as large a part of the batch (drop_last=True in a DataLoader).",
            )
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give every replica the buffers of the first pipeline's, as DistributedDataParallel does before a forward."""
        if self._place.replicas is None:
            return
        with torch.no_grad():
            for buffer in self._stage.buffers():
                dist.broadcast(buffer, self._place.ranks[0][self._place.stage], group=self._place.replicas)

    def mean_of(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over pipelines of ``loss``, which their last ranks know, on every rank."""
        total = loss if self._place.is_last else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total / self._place.pipelines

    def _trainable(self) -> frozenset[str]:
        return frozenset(
            name for name, parameter in self._stage.named_parameters() if parameter.requires_grad
        )


T = TypeVar("T")


def first_differing_rank(description: str, device: torch.device) -> int | None:
    """The first rank that says something else than rank 0; None where all say the same. Every rank calls it."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(description.encode()).digest()), dtype=torch.int64).to(
        device
    )
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, digest)
    return next(
        (rank for rank, rank_digest in enumerate(digests) if not torch.equal(rank_digest, digests[0])), None
    )


def made_alike(what: str, make: Callable[[], T], describe: Callable[[T], str], device: torch.device) -> T:
    """What ``make`` makes on this rank. Raises UserError on all ranks where it does on one, or makes something else.

    ``what`` says of an error on other ranks what they disagree about.
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
            got=f"an error, or something else, on rank {differing_rank} or rank 0",
            fix="Read what it says.",
        )
    return result


class Evaluation:
    """Evaluates with stages that ``make_stage`` makes, in at most ``micro_batches`` parts of one size.

    ``group`` has the ranks of the pipeline, in the order of stages. Every rank of it makes the same calls.
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
        """The output of the last stage, on its rank; None on the others. Only the first stage uses ``inputs``."""
        first = dist.get_rank(self._group) == 0
        samples = torch.tensor([inputs[0].shape[0] if first else 0], device=self._device)
        dist.broadcast(samples, group=self._group, group_src=0)
        if self._schedule is None or int(samples) != self._samples:
            self._samples = int(samples)
            # What torch has worked out for one size does not fit another.
            self._schedule = ScheduleGPipe(self._make_stage(), self._parts())
            left_to_torch(self._schedule)
            merge_outputs_by(self._schedule, _merged)
        return self._schedule.eval(*(inputs if first else ()))

    def _parts(self) -> int:
        return max(count for count in range(1, self._most + 1) if self._samples % count == 0)


def _merged(parts: Sequence[Any]) -> Any:
    """Of one tensor of the outputs: the samples of all parts, or the mean of numbers, as of a model's own loss."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if parts[0].dim():
        return torch.cat([*parts])
    if not parts[0].is_floating_point():
        raise UnsupportedError(
            "the model returns a number that is no mean over samples, and it is evaluated in parts",
            got=f"a tensor without dimensions of {parts[0].dtype}", expected="tensors of samples, or a loss",
            fix="Have the model return what the number is computed of.",
        )  # fmt: skip
    return torch.stack([*parts]).mean()


class Clips(Protocol):
    """A model in stages."""

    @property
    def own_parameters(self) -> Sequence[nn.Parameter]:
        """Those of this rank's stage."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over all stages."""


_models: weakref.WeakSet[Clips] = weakref.WeakSet()


def watch_clipping(model: Clips) -> None:
    """Have ``torch.nn.utils.clip_grad_norm_`` of the parameters of ``model`` clip by the norm over all stages."""
    _models.add(model)
    answer_clipping(_clipped, whole=True)  # replicas know the norm of a stage alone


def _clipped(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, _error_if_nonfinite: bool
) -> torch.Tensor | None:
    """The norm over all stages; None for parameters of none. Raises UnsupportedError for some of a stage's alone."""
    ids = {id(parameter) for parameter in parameters}
    for model in list(_models):
        stage_ids = {id(parameter) for parameter in model.own_parameters}
        if stage_ids.isdisjoint(ids):
            continue
        if norm_type != 2 or stage_ids != ids:
            raise UnsupportedError(
                "gradients of a pipeline can be clipped by the 2-norm of all of them alone",
                got=f"{len(stage_ids & ids)} of the {len(stage_ids)} parameters of a stage, norm_type={norm_type:g}",
                fix="Call clip_grad_norm_(max_norm) of the model.",
            )
        return model.clip_grad_norm_(max_norm)
    return None


Loss = Callable[[Any, Any], torch.Tensor]


class PipelinedModel(nn.Module):
    """The stage of a module that this rank trains; all ranks make the same calls.

    ``stage`` has the modules of the rank's stage under their own names. Parameters and buffers begin as on rank 0.
    ``optimizer`` goes on updating what is left here. Let go of the model that it was made of: that has all stages.
    Modules other than ``torch.nn.Sequential`` are cut with an ``example`` of a batch (``traced.traced_cut``).

    On a mesh of pipelines side by side each trains on a batch of its own, and ``replicate`` wraps the stage so that its
    replicas average gradients. ``placement`` says where this rank is; by default in one pipeline of all ranks.

    Raises UserError and PlanError where the loss or the number of micro-batches is missing, and where the model cannot
    be cut so; UnsupportedError for a model on a device whose tensors the process group cannot send.
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
                "a pipeline computes the loss behind its last stage", got=f"loss_fn={loss_fn!r}",
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
        """Raise UserError: a rank has one stage."""
        raise UserError(
            "a stage of a pipeline cannot be called as the whole model",
            got="model(batch)",
            expected="model.train_step(batch, target), or model.evaluate(batch)",
        )

    @runtime.among("a step")
    def train_step(self, batch: Any, target: torch.Tensor | None) -> torch.Tensor:
        """Forward and backward of one batch in micro-batches; returns the mean of their losses, on every rank.

        Only the first rank of a pipeline uses ``batch``, of shape (samples, …), and only the last one ``target``: None
        for a model that returns its own loss, which ``loss_fn(output, None)`` takes out of its output. A model of
        several inputs is given them as a tuple, or by their names as a dict. The loss is the mean over all
        pipelines. Gradients are added to those that are there, as ``backward`` does. Raises UserError where the batch
        cannot be split evenly, and where pipelines are given batches of other sizes.
        """
        if not isinstance(target, torch.Tensor | None):
            raise UnsupportedError(
                "a pipeline takes one tensor as the target", got=type(target).__name__,
                expected="a tensor whose first dimension is that of the batch",
                fix="Stack or concatenate targets along another dimension, and take them apart in loss_fn.",
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
        """The model's output for ``batch``, on the last rank of each pipeline; None on the others.

        No gradients are computed. Raises UnsupportedError where a traced model hands on other tensors in evaluation
        than in training.
        """
        if self._cut.not_evaluated:
            raise UnsupportedError(
                "this model cannot be evaluated as a pipeline", got=self._cut.not_evaluated
            )
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
        """The stages of all ranks. Raises UserError on every rank where there are none on one."""

        def cut_it() -> Cut | TracedCut:
            if example is None:
                return cut(model, self._ranks, points)
            return traced_cut(model, self._ranks, points, example, self._micro_batches, self._device)

        return made_alike(
            "ranks would cut the model into other stages",
            cut_it,
            lambda model_cut: model_cut.signature(),
            self._device,
        )

    def _inputs(self, batch: Any, *, in_agreement: bool) -> tuple[torch.Tensor, ...]:
        """The tensors that the first stage is given. Raises UserError for another one than the example."""
        if not isinstance(self._cut, TracedCut):
            return (batch,)
        traced = self._cut
        traced.check(self.stage)

        def of_batch() -> tuple[torch.Tensor, ...]:
            return traced.inputs(batch, self._micro_batches) if self._rank == 0 else ()

        if not in_agreement:
            return of_batch()
        return made_alike("ranks do not train on the batch", of_batch, lambda _: "", self._device)

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        # torch would divide all gradients behind the last backward: those of earlier batches once more, and those that
        # replicas have not yet added up before they have.
        own_target = target if self._targeted else None
        loss = self._loss_fn(self._cut.output(output, training=self.stage.training), own_target)
        return loss / self._micro_batches

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """Those of this rank's stage."""
        return list(self.stage.parameters())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the 2-norm of those of all stages is at most ``max_norm``; returns what it was."""
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
        """The state of the whole model, as its ``state_dict`` would have it, on every rank."""
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
        """Take this rank's part of the state of a whole model. Raises UserError for that of another one."""
        if state.keys() != self._like.keys():
            unmatched = sorted(state.keys() ^ self._like.keys())
            raise UserError(
                "this is the state of another model", got=f"{', '.join(unmatched[:4])} on one side only"
            )
        self.stage.load_state_dict({name: state[name] for name in self.stage.state_dict()})

    # Parameters that several stages have -----------------------------------------------------------------

    def _shared_parameters(self) -> list[tuple[nn.Parameter, tuple[int, dist.ProcessGroup | None]]]:
        """This rank's parameters that other stages have too, each with the first such stage and the group of all."""
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
    """Raise UserError unless all ranks have a model of these names, shapes and types."""
    rank = first_differing_rank(
        repr([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in like.items()]), device
    )
    if rank is not None:
        raise UserError(
            "ranks have constructed different models",
            got=f"parameters or buffers of other names, shapes or types on rank {rank} than on rank 0",
            expected="the same model on every rank, of which each keeps a stage",
        )


def _keep(optimizer: Optimizer, stage: nn.Module) -> None:
    """Leave an optimizer what is of ``stage``: groups keep their options and their order."""
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
            "stages cannot hand their outputs on",
            got=f"a model on {device}, {listed}",
            expected="NCCL for CUDA: Gloo sends tensors on the CPU alone",
            fix="Call init_process_group('cpu:gloo,cuda:nccl').",
        )  # fmt: skip
