"""Gradient accumulation at the same batch size: a batch is split, and its parts are trained one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import nn

from headway.errors import UnsupportedError
from headway.graph.computation import Item, Part, Point, Timeline
from headway.job import Job
from headway.model import ModelSpec, ModuleMemory, PassMemory
from headway.passes.base import Pass, whole_model, with_timelines
from headway.passes.other_forward import give_forward, refuse_replaced_forward
from headway.passes.recompute import recomputed


def accumulating(parts: int) -> Callable[[Timeline], Timeline]:
    """A function that changes a step's timeline. It raises UnsupportedError for a step with several forwards."""

    def change(timeline: Timeline) -> Timeline:
        items = timeline.items
        forward = [at for at, item in enumerate(items) if item.kind == Part.FORWARD and item.duration_ns]
        backward = [at for at, item in enumerate(items) if item.kind == Part.BACKWARD and item.duration_ns]
        if not forward or not backward:
            return timeline
        if forward[-1] > backward[0] or sum(item.kind == Point.BACKWARD_END for item in items) > 1:
            raise UnsupportedError(
                "a step with several forwards accumulates gradients already", got=f"step {timeline.step}",
                fix="Leave the pass out of the plan.",
            )  # fmt: skip
        forward_ns, backward_ns = (
            sum(items[at].duration_ns for at in positions) for positions in (forward, backward)
        )
        changed: list[Item] = []
        for at, item in enumerate(items):
            if at == backward[0]:  # all other parts, and the last part's recomputed forward
                before_ns = forward_ns + backward_ns * (parts - 1) // parts
                changed.append(item._replace(name="", duration_ns=before_ns))
            if item.kind in (Part.FORWARD, Part.BACKWARD):
                changed.append(item._replace(duration_ns=item.duration_ns // parts))
            else:
                changed.append(item)
            if at == forward[-1]:
                changed.append(item._replace(name="", duration_ns=forward_ns * (parts - 1) // parts))
        return Timeline(timeline.rank, timeline.step, tuple(changed), timeline.background_ns)

    return change


def in_parts(memory: PassMemory, model: ModelSpec, parts: int) -> PassMemory:
    """``memory`` with one part's activations at a time, and gradients accumulated over all parts.

    Inputs, outputs and gradients of outputs are still those of the whole batch.
    """
    given_bytes = memory.modules[0].begin_bytes
    last = memory.modules[-1]
    output_bytes = last.output_bytes
    rise_bytes = max(module.peak_bytes - module.begin_bytes for module in _innermost(memory))
    parameter_bytes = {parameter.name: parameter.size_bytes for parameter in model.parameters}
    unready_bytes = model.size_bytes
    backward: list[tuple[str, int]] = []
    whole_bytes = 2 * output_bytes  # the output, and its gradient
    for name, held_bytes in memory.backward:
        own_bytes = parameter_bytes.get(name, 0)
        part_bytes = max(0, held_bytes - given_bytes - own_bytes) // parts
        constant_bytes = given_bytes + whole_bytes - whole_bytes // parts
        # The accumulated gradient, the part's gradient and their sum coexist: autograd does not add to views in
        # place, and gradients of linear layers are views.
        backward.append((name, constant_bytes + part_bytes + 2 * own_bytes + unready_bytes))
        unready_bytes -= own_bytes
    loss_bytes = max(0, memory.backward[0][1] - last.end_bytes)
    forward_bytes = max(
        given_bytes + 2 * output_bytes + rise_bytes // parts, given_bytes + output_bytes + loss_bytes
    )
    return memory.model_copy(
        update={"forward_bytes": forward_bytes, "backward": tuple(backward), "modules": ()}
    )


def _innermost(memory: PassMemory) -> list[ModuleMemory]:
    names = {module.module for module in memory.modules}
    outer = {name.rpartition(".")[0] for name in names}
    return [call for call in memory.modules if call.module not in outer]


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MIXED = 1e-3  # relative tolerance between outputs of samples alone and together
FEW_DIGITS = 0.03  # the same for half precision
LEAVE_OUT = "Leave the pass accumulate out of the plan."


def split(module: nn.Module, parts: int) -> None:
    """Make ``module`` compute its batches in ``parts``. Raises UnsupportedError for batch norm."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, BATCH_NORMS):
            raise UnsupportedError(
                "cannot split the batch: batch norm would use the statistics of each part", got=name,
                fix=LEAVE_OUT,
            )  # fmt: skip
    give_forward(module, type(module).__name__, _InParts(parts))
    refuse_replaced_forward(module, "gradient accumulation", LEAVE_OUT)


class _InParts:
    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._checked = False

    def __call__(self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        inputs = (args, kwargs)
        samples = _samples(inputs)
        parts = min(self._parts, samples)  # the last batch of an epoch may have few samples
        if parts < 2:
            return forward(*args, **kwargs)
        first = not self._checked
        if first:
            _check_apart(forward, module, inputs)
            self._checked = True
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()} if first else {}
        bounds = list(pairwise(samples * part // parts for part in range(parts + 1)))
        outputs = []
        for begin, end in bounds:
            part_args, part_kwargs = _part(inputs, begin, end)
            outputs.append(recomputed(forward, module, *part_args, **part_kwargs))
        changed = [
            name
            for name, buffer in module.named_buffers()
            if name in buffers and not torch.equal(buffer, buffers[name])
        ]
        if changed:
            raise UnsupportedError(
                "cannot split the batch: forward changes buffers, which each part would change again",
                got=", ".join(changed), fix=LEAVE_OUT,
            )  # fmt: skip
        return _joined(outputs, [end - begin for begin, end in bounds])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        for element in value.values():
            yield from _tensors(element)


def _samples(inputs: Any) -> int:
    sizes = {tensor.shape[0] if tensor.dim() else 1 for tensor in _tensors(inputs)}
    if len(sizes) != 1:
        raise UnsupportedError(
            "cannot split the batch: its tensors have different numbers of samples",
            got=f"first dimensions of {', '.join(map(str, sorted(sizes))) or 'no tensor'}", fix=LEAVE_OUT,
        )  # fmt: skip
    return int(sizes.pop())


def _part(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[begin:end]
    if type(value) in (tuple, list):
        return type(value)(_part(element, begin, end) for element in value)
    if type(value) is dict:
        return {key: _part(element, begin, end) for key, element in value.items()}
    if any(True for _ in _tensors(value)):
        raise UnsupportedError("cannot split a batch of this type", got=type(value).__name__, fix=LEAVE_OUT)
    return value


def _joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if any(
            not output.dim() or output.shape[0] != sample
            for output, sample in zip(outputs, samples, strict=True)
        ):
            raise UnsupportedError(
                "cannot split the batch: the model returns a value without a batch dimension, such as a loss",
                got=f"a tensor of shape {tuple(first.shape)} for {samples[0]} samples", fix=LEAVE_OUT,
            )  # fmt: skip
        return torch.cat(list(outputs))
    if type(first) in (tuple, list):
        return type(first)(_joined(elements, samples) for elements in zip(*outputs, strict=True))
    if type(first) is dict:
        return {key: _joined([elements[key] for elements in outputs], samples) for key in first}
    raise UnsupportedError(
        "cannot split the batch: outputs of this type cannot be joined", got=type(first).__name__,
        expected="tensors, or tuples, lists and dicts of them", fix=LEAVE_OUT,
    )  # fmt: skip


def _check_apart(forward: Callable[..., Any], module: nn.Module, inputs: Any) -> None:
    """Raise UnsupportedError if two samples give different outputs together and separately."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    outputs = []
    with torch.no_grad(), torch.random.fork_rng():
        module.eval()
        try:
            for begin, end in ((0, 2), (0, 1), (1, 2)):
                args, kwargs = _part(inputs, begin, end)
                outputs.append(forward(*args, **kwargs))
        finally:
            for submodule, mode in modes:
                submodule.training = mode
    together, *alone = outputs
    _joined([together], [2])
    for tensor, expected in zip(_tensors(together), _tensors(_joined(alone, [1, 1])), strict=True):
        if not _are_alike(tensor, expected):
            raise UnsupportedError(
                "cannot split the batch: the model mixes its samples",
                got="different outputs for two samples together and separately, in eval mode", fix=LEAVE_OUT,
            )  # fmt: skip


def _are_alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if not actual.is_floating_point() or not actual.numel():
        return torch.equal(actual, expected)
    few = MIXED if torch.finfo(actual.dtype).eps < MIXED / 10 else FEW_DIGITS
    largest = float(actual.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(actual, expected, rtol=few, atol=few * largest, equal_nan=True)


COUNTS = (2, 4)


class Accumulate(Pass):
    """Splits each batch into ``micro_batches``, so that only one of them has activations at a time.

    Forward computes all of them and keeps only the outputs, from which the script computes its loss as usual. Backward
    recomputes each in turn and accumulates its gradients, which are communicated once, during the last one.
    """

    name: ClassVar[str] = "accumulate"
    saves_memory_alone: ClassVar[bool] = True

    micro_batches: int = Field(ge=2, le=4096)
    """The number of parts of a batch; their sizes differ by at most one sample."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """Two and four parts, if memory was recorded and the model has no known batch norm."""
        is_supported = (
            len(job.stages) == 1 and job.computation is not None and job.model.pass_memory is not None
        )
        if not is_supported or (job.model.chain is not None and job.model.chain.batch_norms):
            return ()
        return tuple(cls(micro_batches=count) for count in COUNTS)

    def rewrite(self, job: Job) -> Job:
        """Double the forward time, delay gradients to the last part's backward, and divide activations.

        Assumes that a part takes its share of the batch's time, which is optimistic for small parts. Raises
        UnsupportedError for recordings without memory, steps with several forwards, and batch norm.
        """
        model = whole_model(job, "gradient accumulation")
        if model.chain is not None and model.chain.batch_norms:
            raise UnsupportedError(
                "cannot split the batch: batch norm would use the statistics of each part",
                got=self.describe(), fix="Leave the pass out of the plan, or use recompute.",
            )  # fmt: skip
        memory = model.pass_memory
        if memory is None or not memory.modules or memory.gradients_accumulate:
            raise UnsupportedError(
                "the recording lacks the memory of forward and backward", got=self.describe(),
                expected="a recording of stock DDP with memory and one forward per step",
                fix="Record the job again.",
            )  # fmt: skip
        changed = model.model_copy(update={"pass_memory": in_parts(memory, model, self.micro_batches)})
        again = with_timelines(job, accumulating(self.micro_batches))
        return replace(again, stages=(changed,))

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Make the forward of ``module`` split its inputs; returns ``module``.

        Raises UnsupportedError for batch norm. The first forward raises it if the model mixes samples or returns
        values without a batch dimension.
        """
        del optimizer

        split(module, self.micro_batches)
        return module

    def describe(self) -> str:
        """The number of micro-batches, in words."""
        return f"accumulate {self.micro_batches} micro-batches"
