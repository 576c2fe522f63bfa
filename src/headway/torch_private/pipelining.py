"""Private names of ``torch.distributed.pipelining``: running its schedules' stages one micro-batch at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from headway.torch_private.tensors import preserved_versions


class InputGradients:
    """Calls ``when_ready`` during the backward of one micro-batch, once all gradients of the stage's inputs are ready.

    The gradients are then stored where torch's stage looks for what it sends. An exception of ``when_ready`` is raised
    by ``done``: raised in backward, it would leave replicas waiting for each other.
    """

    def __init__(self, stage: Any, micro_batch: int, when_ready: Callable[[], None]) -> None:
        self._stage, self._micro_batch, self._when_ready = stage, micro_batch, when_ready
        self._is_ready = False
        self._failure: Exception | None = None
        _, values = stage.fwd_cache[micro_batch]
        self._values = values[: len(stage.args_recv_info[micro_batch])]
        awaited = [
            value
            for value in self._values
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        ]
        self._missing = len(awaited)
        self._handles = [leaf.register_post_accumulate_grad_hook(self._computed) for leaf in awaited]

    def _computed(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if self._missing:
            return
        self._is_ready = True
        self._stage.bwd_cache[self._micro_batch] = tuple(
            value.grad if isinstance(value, torch.Tensor) else None for value in self._values
        )
        try:
            self._when_ready()
        except Exception as failure:  # raised again after backward
            self._failure = failure

    def done(self) -> None:
        """Backward has returned. Calls ``when_ready`` now if some input got no gradient, so that it was not called."""
        for handle in self._handles:
            handle.remove()
        if self._failure is not None:
            raise self._failure
        if self._is_ready:
            self._stage.bwd_cache.pop(self._micro_batch, None)  # stored again by torch, but already sent
        else:
            self._when_ready()


_INFERENCES = ("_forward_metadata_inference", "_shape_inference")  # of torch 2.13, and of earlier ones


def preserve_state_in_inference(stage: Any) -> None:
    """Have the forwards with which torch infers shapes of ``stage`` leave buffers and the random state unchanged.

    They run before the first step and after every switch from evaluation, and would count in ``BatchNorm`` statistics.
    """
    for name in _INFERENCES:
        if hasattr(stage, name):
            setattr(stage, name, functools.partial(_inferred, stage, getattr(stage, name)))


def _inferred(stage: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    kept = [(buffer, buffer.clone()) for buffer in stage.submod.buffers()]
    on = [stage.device] if stage.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on):
        try:
            return original(*args, **kwargs)
        finally:
            with torch.no_grad(), preserved_versions([buffer for buffer, _ in kept]):
                for buffer, value in kept:
                    buffer.copy_(value)


_PLANNED = "_headway_planned"
_SPLIT = "_split_inputs"  # the first method that a step calls
COMPUTE_LOSS = "_maybe_compute_loss"
_NO_TENSOR = ("PipeliningMetadataError",)  # of torch 2.13; earlier versions fail later, with other errors


def pipeline_stage() -> Any:
    """The base class of stages; None if ``torch.distributed.pipelining`` is not imported."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    return getattr(stages, "_PipelineStageBase", None)


def pipeline_schedules() -> tuple[Any, ...]:
    """The schedule classes that define ``step``. ``torch.distributed.pipelining`` must be imported."""
    from torch.distributed.pipelining import schedules

    return (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)


def pipeline_schedule() -> Any:
    """The base class of schedules. Its method ``COMPUTE_LOSS`` is called after every forward."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineSchedule


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def kept_outputs(stage: Any) -> list[Any]:
    """The outputs of the last step that a stage keeps for the script."""
    outputs: list[Any] = stage.output_chunks
    return outputs


def ends_of_backward(
    stage: Any, micro_batch: int, loss: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where the backward of a micro-batch begins (its loss or outputs) and ends (its inputs)."""
    outputs, inputs = stage.fwd_cache[micro_batch]
    return tensors_in(outputs if loss is None else loss), tensors_in(inputs)


def is_non_tensor_output_error(failure: Exception) -> bool:
    """Whether torch raised ``failure`` because a stage returned something other than tensors."""
    return any(kind.__name__ in _NO_TENSOR for kind in type(failure).__mro__)


def is_stage(value: object) -> bool:
    """Whether ``value`` is a pipeline stage."""
    stage = pipeline_stage()
    return stage is not None and isinstance(value, stage)


def plan_of_stage(stage: object) -> object | None:
    """The plan noted on a stage by ``PipelineSteps.note_plan``, if any."""
    return getattr(stage, _PLANNED, None)


def before_first_step(take_over: Callable[[PipelineSteps], None]) -> Callable[[], None]:
    """Have ``take_over`` called at the first step of every schedule constructed from now on, before the batch is split.

    Returns a function that undoes this.
    """
    from torch.distributed.pipelining import schedules

    undo: list[Callable[[], None]] = []
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        original = kind.__init__

        def construct(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> None:
            _original(self, *args, **kwargs)

            def first(*args_: Any, **kwargs_: Any) -> Any:
                delattr(self, _SPLIT)  # restore torch's own method
                take_over(PipelineSteps(self))
                return getattr(self, _SPLIT)(*args_, **kwargs_)

            setattr(self, _SPLIT, first)

        functools.update_wrapper(construct, original)
        kind.__init__ = construct  # type: ignore[method-assign]
        undo.append(functools.partial(setattr, kind, "__init__", original))

    def undo_all() -> None:
        for restore in undo:
            restore()

    return undo_all


def leave_to_torch(schedule: Any) -> None:
    """Exclude ``schedule`` from ``before_first_step``."""
    vars(schedule).pop(_SPLIT, None)


def merge_outputs_by(schedule: Any, merge: Callable[[Sequence[Any]], Any]) -> None:
    """Have ``merge`` combine the micro-batches' outputs into each output of ``schedule``; torch concatenates them."""

    def merge_all(outputs: Sequence[Any]) -> Any:
        return tree_map(lambda *parts: merge(parts), *outputs)

    schedule._merge_outputs = merge_all


class PipelineSteps:
    """One of torch's schedules on this rank, whose steps can be run by other code.

    torch still splits batches into micro-batches, infers shapes, and computes losses and outputs.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        stages = stages_of(schedule)
        self.stages: dict[int, Any] = {stage.stage_index: stage for stage in stages}
        self.stage_count: int = stages[0].num_stages
        self.rank: int = stages[0].group_rank
        self.halves_backwards = False  # whether backwards will run in two halves
        self._first_loss: Callable[[Callable[[Any, Any], Any], Any, Any], object] | None = None
        self._torch_step = schedule._step_microbatches
        self._signature = inspect.signature(self._torch_step)
        single = hasattr(schedule, "_initialize_stage")
        self._initialise = schedule._initialize_stage if single else schedule._initialize_stages
        for stage in stages:
            preserve_state_in_inference(stage)
        # Earlier torch has no use for targets.
        self._initialise_takes = len(inspect.signature(self._initialise).parameters)

    @property
    def awaits_first_step(self) -> bool:
        """Whether ``before_first_step`` will still call back at this schedule's first step."""
        return _SPLIT in vars(self._schedule)

    @property
    def modules(self) -> dict[int, torch.nn.Module]:
        """The stages' modules."""
        return {index: stage.submod for index, stage in self.stages.items()}

    @property
    def replicated(self) -> frozenset[int]:
        """The stages wrapped in DistributedDataParallel: their last backward ends with the gradients' all-reduce."""
        return frozenset(
            index for index, module in self.modules.items() if isinstance(module, DistributedDataParallel)
        )

    def replicas_of(self, stage: int) -> list[int]:
        """The ranks that all-reduce a stage's gradients; empty if it is not wrapped in DistributedDataParallel."""
        module = self.stages[stage].submod
        if not isinstance(module, DistributedDataParallel):
            return []
        return dist.get_process_group_ranks(module.process_group)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches a batch is split into."""
        count: int = self._schedule._n_microbatches
        return count

    def split_into(self, count: int) -> None:
        """Split batches into ``count`` micro-batches from now on; call this before the first step.

        Only for schedules with one stage per rank, which read the number in each step; others have a fixed order.
        """
        assert not hasattr(self._schedule, "_stages"), "several stages a rank"
        self._schedule._n_microbatches = count

    @property
    def divides_gradients(self) -> bool:
        """Whether the schedule divides gradients by the number of micro-batches."""
        divides: bool = self._schedule.scale_grads
        return divides

    def when_first_loss(self, check: Callable[[Callable[[Any, Any], Any], Any, Any], object]) -> None:
        """Have ``check`` called once, with the script's loss function, an output and its target, if there is a loss."""
        self._first_loss = check

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of the pipeline's ranks."""
        group: dist.ProcessGroup | None = next(iter(self.stages.values())).group or dist.group.WORLD
        assert group is not None
        return group

    @property
    def device(self) -> torch.device:
        """The device of the stages."""
        device: torch.device = next(iter(self.stages.values())).device
        return device

    @property
    def trains(self) -> bool:
        """Whether the current step has backwards."""
        return all(stage.has_backward for stage in self.stages.values())

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """For each stage, the rank in the pipeline's group that has it."""
        places = next(iter(self.stages.values())).stage_index_to_group_rank
        return tuple(places[stage] for stage in range(self.stage_count))

    def note_plan(self, plan: object) -> None:
        """Note ``plan`` on the stages, for ``plan_of_stage``."""
        for stage in self.stages.values():
            setattr(stage, _PLANNED, plan)

    def replace_step(self, step: Callable[[dict[str, Any]], None]) -> None:
        """Have ``step`` run every step from now on. It gets the arguments of torch's own method, by name."""

        def replaced(*args: Any, **kwargs: Any) -> None:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            step(bound.arguments)

        self._schedule._step_microbatches = replaced

    def run_torch_step(self, arguments: dict[str, Any]) -> None:
        """Run a step in torch's own order."""
        self._torch_step(**arguments)

    def begin(self, arguments: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Check a step's arguments and prepare the stages; returns each micro-batch's args and kwargs."""
        schedule, targets = self._schedule, arguments["target_mbs"]
        args, kwargs = schedule._check_inputs(
            arguments["arg_mbs"], arguments["kwarg_mbs"], targets, arguments["losses"]
        )
        more = (None if targets is None else targets[0], arguments.get("loss_kwargs"))
        with contextlib.ExitStack() as stack:
            # torch infers shapes with a forward, after which DDP would expect to reduce gradients in the next backward,
            # and would fail in the last one.
            for module in self.modules.values():
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            self._initialise(*(args[0], kwargs[0], *more)[: self._initialise_takes])
        return args, kwargs

    def end(self, arguments: dict[str, Any]) -> None:
        """All micro-batches are done: return the losses, and let data parallelism finish."""
        schedule = self._schedule
        schedule._update_losses(list(self.stages.values()), arguments["losses"])
        if self.trains:
            for stage in self.stages.values():
                stage.perform_reduce_grad(schedule._n_microbatches if schedule.scale_grads else 1)

    # One micro-batch ---------------------------------------------------------------------------------

    def forward(
        self, stage: int, micro_batch: int, args: Any, kwargs: Any, arguments: dict[str, Any]
    ) -> None:
        """Run a stage's forward, and the loss after the last stage; pass the output to the next stage if it is here."""
        torch_stage = self.stages[stage]
        output = torch_stage.forward_one_chunk(
            micro_batch, args, kwargs, save_forward_output=arguments.get("return_outputs", True)
        )
        if self.halves_backwards and not torch_stage.is_last:
            outputs, inputs = torch_stage.fwd_cache[micro_batch]
            torch_stage.fwd_cache[micro_batch] = (tuple(map(_unaliased, outputs)), inputs)
        more = [arguments["loss_kwargs"]] if "loss_kwargs" in arguments else []
        self._schedule._maybe_compute_loss(torch_stage, output, arguments["target_mbs"], micro_batch, *more)
        if self._first_loss is not None and torch_stage.is_last:
            check, self._first_loss = self._first_loss, None
            loss_of = functools.partial(_loss_of, self._schedule, more)
            check(loss_of, output, arguments["target_mbs"][micro_batch])
        if stage + 1 in self.stages:
            self.stages[stage + 1].set_local_fwd_input(output, micro_batch)

    def backward(
        self,
        stage: int,
        micro_batch: int,
        *,
        full: bool,
        last: bool,
        send: Callable[[], None] | None = None,
    ) -> None:
        """Run a stage's backward (``full``) or only the half for its inputs; pass their gradients to a local stage.

        ``last``: no gradient of this stage's parameters comes later. ``send`` is called during the backward, once the
        inputs' gradients can be sent.
        """
        torch_stage = self.stages[stage]
        outputs, _ = torch_stage.fwd_cache[micro_batch]
        loss = self._schedule._maybe_get_loss(torch_stage, micro_batch)
        sending = None if send is None else InputGradients(torch_stage, micro_batch, send)
        torch_stage.backward_one_chunk(micro_batch, loss=loss, full_backward=full, last_backward=last)
        if sending is not None:
            sending.done()
        if torch_stage.is_last:
            _let_go_of_graph(torch_stage.output_chunks, outputs, loss)
        if stage - 1 in self.stages:
            self.stages[stage - 1].set_local_bwd_input(
                torch_stage.get_local_bwd_output(micro_batch), micro_batch
            )

    def backward_of_weights(self, stage: int, micro_batch: int, *, last: bool) -> None:
        """Run the second half of a stage's backward: the gradients of its parameters."""
        self.stages[stage].backward_weight_one_chunk(micro_batch, last_backward=last)

    def received_tensors(self, stage: int) -> list[str]:
        """The type and shape of each tensor that a stage receives for a micro-batch, once stages are prepared."""
        infos = self.stages[stage].args_recv_info.get(0, ())
        return [_described(info.buffer) for info in infos if getattr(info, "buffer", None) is not None]

    def sent_tensors(self, stage: int) -> list[str]:
        """The same for what a stage sends; empty if this torch does not record it."""
        metas = getattr(getattr(self.stages[stage], "_stage_meta", None), "outputs", None) or ()
        return [_described(meta) for meta in metas]

    # Messages ----------------------------------------------------------------------------------------

    def receive_buffers(self, stage: int, micro_batch: int, *, gradients: bool) -> ReceiveBuffers:
        """The memory into which a stage receives a micro-batch's activations, or their gradients."""
        torch_stage = self.stages[stage]
        infos = torch_stage.grad_recv_info if gradients else torch_stage.args_recv_info
        return ReceiveBuffers([info for info in infos[micro_batch] if hasattr(info, "buffer")])

    def receives(self, stage: int, micro_batch: int, *, gradients: bool) -> list[Any]:
        """The receives for a micro-batch, as arguments of ``batch_isend_irecv``."""
        torch_stage = self.stages[stage]
        operations: list[Any] = (torch_stage.get_bwd_recv_ops if gradients else torch_stage.get_fwd_recv_ops)(
            micro_batch
        )
        return operations

    def sends(self, stage: int, micro_batch: int, *, gradients: bool) -> list[Any]:
        """The sends for a micro-batch, likewise."""
        torch_stage = self.stages[stage]
        operations: list[Any] = (torch_stage.get_bwd_send_ops if gradients else torch_stage.get_fwd_send_ops)(
            micro_batch
        )
        return operations


def _loss_of(schedule: Any, more: Sequence[Any], output: Any, target: Any) -> Any:
    return schedule._compute_loss(output, target, *more)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists and dicts."""
    return [tree_leaf for tree_leaf in tree_leaves(value) if isinstance(tree_leaf, torch.Tensor)]


def _described(tensor: Any) -> str:
    """The type and shape of a tensor, or of torch's metadata of one."""
    distributed = "DTensor " if "DTensor" in type(tensor).__name__ else ""
    return f"{distributed}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _unaliased(output: Any) -> Any:
    """Copy an output that is a view: with halved backwards, torch detaches outputs in place, which views forbid."""
    return output.clone() if isinstance(output, torch.Tensor) and output._is_view() else output


def _let_go_of_graph(chunks: list[Any], outputs: Sequence[Any], loss: torch.Tensor | None) -> None:
    """Detach the outputs and loss kept for the script from the graph of a micro-batch whose backward is done.

    torch only detaches outputs that are not views. The others would keep the stage's input alive until the end of the
    step, and with halved backwards most activations.
    """
    if loss is not None and not loss._is_view():
        loss.detach_()
    views = {
        id(output): output.detach()
        for output in outputs
        if isinstance(output, torch.Tensor) and output._is_view()
    }
    for place, chunk in enumerate(chunks):
        if any(id(tree_leaf) in views for tree_leaf in tree_leaves(chunk)):
            chunks[place] = tree_map(lambda leaf: views.get(id(leaf), leaf), chunk)


class ReceiveBuffers:
    """The buffers of one message. torch allocates those of all micro-batches at once, and keeps them."""

    def __init__(self, infos: Sequence[Any]) -> None:
        self._infos = infos

    def templates(self) -> list[torch.Tensor | None]:
        """A meta tensor like each buffer."""
        return [
            None if info.buffer is None else _like(info.buffer, torch.device("meta")) for info in self._infos
        ]

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return next(
            (info.buffer.device for info in self._infos if info.buffer is not None), torch.device("cpu")
        )

    def allocate(self, templates: Sequence[torch.Tensor | None], device: torch.device) -> None:
        """Allocate the buffers."""
        for info, like in zip(self._infos, templates, strict=True):
            info.buffer = None if like is None else _like(like, device)

    def tensors(self) -> list[torch.Tensor]:
        """The buffers that exist."""
        return [info.buffer for info in self._infos if info.buffer is not None]

    def release(self) -> None:
        """Drop the buffers' memory. Whoever needs the received tensors holds them."""
        for info in self._infos:
            if (
                info.buffer is not None
            ):  # replaced by a meta tensor, as torch before 2.13 expects a tensor to reset
                info.buffer = _like(info.buffer, torch.device("meta"))


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Before 2.13 torch had its buffers require gradients itself.
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)
