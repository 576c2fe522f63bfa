"""An ordinary module as a pipeline: this rank's stage of it, whose steps train the whole model."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError, UserError
from headway.strategies.live.reads import answer_clipping
from headway.strategies.pipeline import runtime
from headway.strategies.pipeline.cutting import Cut, cut
from headway.strategies.pipeline.placement import Placement, Replicas, Replicate
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.traced import TracedCut, traced_cut
from headway.torch_private.pipelining import PipelineSteps, leave_to_torch, merge_outputs_by, tensors_in

Made = TypeVar("Made")


def differing(said: str, device: torch.device) -> int | None:
    """The first rank that says something else than rank 0; None where all say the same. Every rank calls it."""
    own = torch.frombuffer(bytearray(hashlib.sha256(said.encode()).digest()), dtype=torch.int64).to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return next((rank for rank, each in enumerate(found) if not torch.equal(each, found[0])), None)


def together(
    what: str, make: Callable[[], Made], describe: Callable[[Made], str], device: torch.device
) -> Made:
    """What ``make`` makes on this rank. Raises UserError on all ranks where it does on one, or makes something else.

    ``what`` says of an error on other ranks what they disagree about.
    """
    failure: UserError | None = None
    try:
        made = make()
        said = f"made {describe(made)}"
    except UserError as error:
        failure, said = error, f"refused {error}"
    other = differing(said, device)
    if failure is not None:
        raise failure
    if other is not None:
        raise UserError(
            what, got=f"an error, or something else, on rank {other} or rank 0", fix="Read what it says."
        )
    return made


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
            leave_to_torch(self._schedule)
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
    given = {id(parameter) for parameter in parameters}
    for model in list(_models):
        own = {id(each) for each in model.own_parameters}
        if own.isdisjoint(given):
            continue
        if norm_type != 2 or own != given:
            raise UnsupportedError(
                "gradients of a pipeline can be clipped by the 2-norm of all of them alone",
                got=f"{len(own & given)} of the {len(own)} parameters of a stage, norm_type={norm_type:g}",
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
        state = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
        self._like = {name: torch.empty_like(each, device="meta") for name, each in state.items()}
        self._device = next((each.device for each in state.values()), torch.device("cpu"))
        _check_alike(self._like, self._device)
        _check_messages(self._device, self._place.group)
        self._cut = self._agreed_cut(model, strategy.split_points, example)
        self._have_begun = False
        self._targeted = True
        for each in state.values():
            dist.broadcast(each, 0)
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
        told = self._cut.arguments(self._rank)
        return PipelineStage(module, self._rank, self._ranks, self._device, group=self._place.group, **told)

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
        earlier = [(each, each.grad) for each, _ in self._shared if each.grad is not None]
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
        loss = torch.stack([each.detach() for each in losses]).sum() if losses else torch.zeros(())
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
            for each, training in modes:
                each.training = training

    def _agreed_cut(self, model: nn.Module, points: Sequence[str], example: Any) -> Cut | TracedCut:
        """The stages of all ranks. Raises UserError on every rank where there are none on one."""

        def cut_it() -> Cut | TracedCut:
            if example is None:
                return cut(model, self._ranks, points)
            return traced_cut(model, self._ranks, points, example, self._micro_batches, self._device)

        return together(
            "ranks would cut the model into other stages", cut_it, lambda found: found.said(), self._device
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
        return together("ranks do not train on the batch", of_batch, lambda _: "", self._device)

    def _loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        # torch would divide all gradients behind the last backward: those of earlier batches once more, and those that
        # replicas have not yet added up before they have.
        given = target if self._targeted else None
        found = self._loss_fn(self._cut.output(output, training=self.stage.training), given)
        return found / self._micro_batches

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """Those of this rank's stage."""
        return list(self.stage.parameters())

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that the 2-norm of those of all stages is at most ``max_norm``; returns what it was."""
        counted_elsewhere = {id(parameter) for parameter, (first, _) in self._shared if first != self._rank}
        own = [each for each in self.stage.parameters() if each.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        for each in own:
            if id(each) not in counted_elsewhere:
                assert each.grad is not None
                square += each.grad.double().norm() ** 2
        dist.all_reduce(square, group=self._place.group)
        norm = square.sqrt()
        scale = float(max_norm / (norm + 1e-6))
        if scale < 1:
            for each in own:
                assert each.grad is not None
                each.grad.mul_(scale)
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state of the whole model, as its ``state_dict`` would have it, on every rank."""
        own = self.stage.state_dict()
        found = {}
        for name, like in self._like.items():
            stage = self._cut.stages_of(name)[0]
            value = (
                own[name].detach().clone()
                if stage == self._rank and self._place.pipeline == 0
                else torch.empty_like(like, device=self._device)
            )
            dist.broadcast(value, self._place.ranks[0][stage])
            found[name] = value
        return found

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of the state of a whole model. Raises UserError for that of another one."""
        if state.keys() != self._like.keys():
            other = sorted(state.keys() ^ self._like.keys())
            raise UserError(
                "this is the state of another model", got=f"{', '.join(other[:4])} on one side only"
            )
        self.stage.load_state_dict({name: state[name] for name in self.stage.state_dict()})

    # Parameters that several stages have -----------------------------------------------------------------

    def _shared_parameters(self) -> list[tuple[nn.Parameter, tuple[int, dist.ProcessGroup | None]]]:
        """This rank's parameters that other stages have too, each with the first such stage and the group of all."""
        own = dict(self.stage.named_parameters(remove_duplicate=False))
        found = []
        for names in self._cut.tied:
            stages = sorted({stage for name in names for stage in self._cut.stages_of(name)})
            if len(stages) == 1:
                continue
            ranks = [[rank[each] for each in stages] for rank in self._place.ranks]
            world = dist.group.WORLD
            assert world is not None
            timeout = torch_private.group_timeout(world)
            groups = [dist.new_group(each, timeout) for each in ranks]
            if self._rank in stages:
                group = groups[self._place.pipeline]
                found.append((next(own[name] for name in names if name in own), (stages[0], group)))
        return found

    def _sum_shared(self) -> None:
        for parameter, (_, group) in self._shared:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)


def _check_alike(like: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Raise UserError unless all ranks have a model of these names, shapes and types."""
    other = differing(repr([(name, tuple(each.shape), each.dtype) for name, each in like.items()]), device)
    if other is not None:
        raise UserError(
            "ranks have constructed different models",
            got=f"parameters or buffers of other names, shapes or types on rank {other} than on rank 0",
            expected="the same model on every rank, of which each keeps a stage",
        )


def _keep(optimizer: Optimizer, stage: nn.Module) -> None:
    """Leave an optimizer what is of ``stage``: groups keep their options and their order."""
    own = {id(each) for each in stage.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) in own]
    for parameter in [each for each in optimizer.state if id(each) not in own]:
        del optimizer.state[parameter]


def _check_messages(device: torch.device, group: dist.ProcessGroup | None) -> None:
    within = dist.group.WORLD if group is None else group
    assert within is not None
    backends = torch_private.backends_of(within)
    if device.type != "cpu" and backends.get(device.type) in (None, "gloo"):
        raise UnsupportedError(
            "stages cannot hand their outputs on",
            got=f"a model on {device}, {', '.join(f'{own} for {kind}' for kind, own in sorted(backends.items()))}",
            expected="NCCL for CUDA: Gloo sends tensors on the CPU alone",
            fix="Call init_process_group('cpu:gloo,cuda:nccl').",
        )  # fmt: skip
