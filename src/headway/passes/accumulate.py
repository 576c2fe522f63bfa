"""Gradient accumulation at the same batch: it is split, and its parts are trained one after the other."""

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
from headway.passes.other_forward import give_forward, refuse_forwards_put_there
from headway.passes.recompute import recomputed


def accumulating(parts: int) -> Callable[[Timeline], Timeline]:
    """How a step of one forward and backward changes. Raises UnsupportedError for a step of several."""

    def change(timeline: Timeline) -> Timeline:
        items = timeline.items
        forward = [at for at, item in enumerate(items) if item.kind == Part.FORWARD and item.duration_ns]
        backward = [at for at, item in enumerate(items) if item.kind == Part.BACKWARD and item.duration_ns]
        if not forward or not backward:
            return timeline
        if forward[-1] > backward[0] or sum(item.kind == Point.BACKWARD_END for item in items) > 1:
            raise UnsupportedError(
                "a step of several forwards accumulates gradients already", got=f"step {timeline.step}",
                fix="Leave the pass out of the plan.",
            )  # fmt: skip
        forward_ns, backward_ns = (sum(items[at].duration_ns for at in own) for own in (forward, backward))
        changed: list[Item] = []
        for at, item in enumerate(items):
            if at == backward[0]:  # the other parts, and the last one's forward once more
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
    """``memory`` where a part's activations are there at a time, and gradients add up until the last part's are done.

    What the model is given and puts out is of the whole batch, and so is the gradient of the latter.
    """
    given_bytes = memory.modules[0].begin_bytes
    last = memory.modules[-1]
    output_bytes = last.output_bytes
    rise_bytes = max(each.peak_bytes - each.begin_bytes for each in _innermost(memory))
    own = {parameter.name: parameter.size_bytes for parameter in model.parameters}
    unready_bytes = model.size_bytes
    backward: list[tuple[str, int]] = []
    whole_bytes = 2 * output_bytes  # what is put out, and its gradient
    for name, held_bytes in memory.backward:
        own_bytes = own.get(name, 0)
        part_bytes = max(0, held_bytes - given_bytes - own_bytes) // parts
        constant_bytes = given_bytes + whole_bytes - whole_bytes // parts
        # Besides the sum so far there are a part's gradient and their new sum: autograd does not add to views in place,
        # and gradients of linear layers are views.
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
    return [each for each in memory.modules if each.module not in outer]


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
MIXED = 1e-3  # by how much outputs of samples alone may differ from those of samples together
FEW_DIGITS = 0.03  # the same of half precision
LEAVE_OUT = "Leave the pass accumulate out of the plan."


def split(module: nn.Module, parts: int) -> None:
    """Have ``module`` compute its batches in ``parts``. Raises UnsupportedError for batch norm."""
    for name, each in module.named_modules():
        if isinstance(each, BATCH_NORMS):
            raise UnsupportedError(
                "a batch with batch norm cannot be split: each part would have other statistics", got=name,
                fix=LEAVE_OUT,
            )  # fmt: skip
    give_forward(module, type(module).__name__, _InParts(parts))
    refuse_forwards_put_there(module, "a batch in parts", LEAVE_OUT)


class _InParts:
    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._checked = False

    def __call__(self, forward: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training:
            return forward(*args, **kwargs)
        given = (args, kwargs)
        samples = _samples(given)
        parts = min(self._parts, samples)  # the last batch of an epoch may have few samples
        if parts < 2:
            return forward(*args, **kwargs)
        first = not self._checked
        if first:
            _check_apart(forward, module, given)
            self._checked = True
        buffers = {name: each.clone() for name, each in module.named_buffers()} if first else {}
        bounds = list(pairwise(samples * part // parts for part in range(parts + 1)))
        outputs = []
        for begin, end in bounds:
            own_args, own_kwargs = _part(given, begin, end)
            outputs.append(recomputed(forward, module, *own_args, **own_kwargs))
        changed = [
            name
            for name, each in module.named_buffers()
            if name in buffers and not torch.equal(each, buffers[name])
        ]
        if changed:
            raise UnsupportedError(
                "forward changes buffers, which parts of a batch would change several times",
                got=", ".join(changed), fix=LEAVE_OUT,
            )  # fmt: skip
        return _joined(outputs, [end - begin for begin, end in bounds])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _samples(given: Any) -> int:
    sizes = {tensor.shape[0] if tensor.dim() else 1 for tensor in _tensors(given)}
    if len(sizes) != 1:
        raise UnsupportedError(
            "a batch cannot be split whose tensors do not all have as many samples",
            got=f"first dimensions of {', '.join(map(str, sorted(sizes))) or 'no tensor'}", fix=LEAVE_OUT,
        )  # fmt: skip
    return int(sizes.pop())


def _part(value: Any, begin: int, end: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[begin:end]
    if type(value) in (tuple, list):
        return type(value)(_part(each, begin, end) for each in value)
    if type(value) is dict:
        return {key: _part(each, begin, end) for key, each in value.items()}
    if any(True for _ in _tensors(value)):
        raise UnsupportedError(
            "a batch of this type cannot be split", got=type(value).__name__, fix=LEAVE_OUT
        )
    return value


def _joined(outputs: Sequence[Any], samples: Sequence[int]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if any(
            not output.dim() or output.shape[0] != sample
            for output, sample in zip(outputs, samples, strict=True)
        ):
            raise UnsupportedError(
                "a model puts out what is not of its samples, such as a loss, so that its batch cannot be split",
                got=f"a tensor of shape {tuple(first.shape)} for {samples[0]} samples", fix=LEAVE_OUT,
            )  # fmt: skip
        return torch.cat(list(outputs))
    if type(first) in (tuple, list):
        return type(first)(_joined(each, samples) for each in zip(*outputs, strict=True))
    if type(first) is dict:
        return {key: _joined([each[key] for each in outputs], samples) for key in first}
    raise UnsupportedError(
        "outputs of this type cannot be put together again", got=type(first).__name__,
        expected="tensors, and tuples, lists and dicts of them", fix=LEAVE_OUT,
    )  # fmt: skip


def _check_apart(forward: Callable[..., Any], module: nn.Module, given: Any) -> None:
    """Raise UnsupportedError where two samples give something else together than each by itself."""
    modes = [(each, each.training) for each in module.modules()]
    outputs = []
    with torch.no_grad(), torch.random.fork_rng():
        module.eval()
        try:
            for begin, end in ((0, 2), (0, 1), (1, 2)):
                args, kwargs = _part(given, begin, end)
                outputs.append(forward(*args, **kwargs))
        finally:
            for each, mode in modes:
                each.training = mode
    together, *alone = outputs
    _joined([together], [2])
    for tensor, other in zip(_tensors(together), _tensors(_joined(alone, [1, 1])), strict=True):
        if not _are_alike(tensor, other):
            raise UnsupportedError(
                "this model mixes the samples of a batch, so that parts of it are trained otherwise",
                got="other outputs of two samples together than of each alone, in eval mode", fix=LEAVE_OUT,
            )  # fmt: skip


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    few = MIXED if torch.finfo(one.dtype).eps < MIXED / 10 else FEW_DIGITS
    largest = float(one.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, other, rtol=few, atol=few * largest, equal_nan=True)


COUNTS = (2, 4)


class Accumulate(Pass):
    """Each batch is split into ``micro_batches``, and one of them at a time has activations.

    Forward computes all of them and keeps nothing but what comes out, of which the script makes its loss as ever.
    Backward computes each again, and then its gradients, which add up: they are communicated once, while the last one
    is computed.
    """

    name: ClassVar[str] = "accumulate"
    saves_memory_alone: ClassVar[bool] = True

    micro_batches: int = Field(ge=2, le=4096)
    """Into how many parts a batch is split, of sizes that differ by one sample at most."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """Two and four parts, where memory was watched and no batch norm is known."""
        known = len(job.stages) == 1 and job.computation is not None and job.model.pass_memory is not None
        if not known or (job.model.chain is not None and job.model.chain.batch_norms):
            return ()
        return tuple(cls(micro_batches=count) for count in COUNTS)

    def rewrite(self, job: Job) -> Job:
        """Forward is computed twice, gradients are ready only in the last part's backward, and activations divided.

        A part is taken to need its share of the batch's time; small parts need more. Raises UnsupportedError where
        no memory was watched, for steps of several forwards, and for batch norm.
        """
        model = whole_model(job, "gradient accumulation")
        if model.chain is not None and model.chain.batch_norms:
            raise UnsupportedError(
                "a batch with batch norm cannot be split: each part would have other statistics",
                got=self.describe(), fix="Leave the pass out of the plan, or use recompute.",
            )  # fmt: skip
        memory = model.pass_memory
        if memory is None or not memory.modules or memory.gradients_accumulate:
            raise UnsupportedError(
                "it is not known what a pass of the whole batch holds", got=self.describe(),
                expected="a recording of stock DDP with one forward a step that has watched its memory",
                fix="Record the job again.",
            )  # fmt: skip
        changed = model.model_copy(update={"pass_memory": in_parts(memory, model, self.micro_batches)})
        again = with_timelines(job, accumulating(self.micro_batches))
        return replace(again, stages=(changed,))

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, whose forward splits what it is given.

        Raises UnsupportedError for batch norm. The first forward raises it for a model that mixes samples, or does not
        put out tensors of samples.
        """
        del optimizer

        split(module, self.micro_batches)
        return module

    def describe(self) -> str:
        """Say how many parts there are."""
        return f"accumulate {self.micro_batches} micro-batches"
