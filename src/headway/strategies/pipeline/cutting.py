"""Splits a module into pipeline stages: an ``nn.Sequential`` by its children, others by the calls of their forward.

The forward of other modules is recorded once in training and once in evaluation mode (``tracing``), and divided among
stages (``dividing``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from headway.errors import PlanError, UnsupportedError, UserError
from headway.strategies.pipeline import dividing
from headway.strategies.pipeline.dividing import Ambience, Attribute, Like, Program, Recording, Submodule
from headway.strategies.pipeline.stage_times import SplitLayer, split
from headway.strategies.pipeline.tracing import SplitInsideError, record
from headway.torch_private.tracing import leaves, mapped


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.detach()  # not a view: autograd forbids changing a function's views in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def changeable(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Returns tensors that may be changed in place, in the same memory: leaves become results of an operation.

    Autograd refuses to have leaves changed in place, and a stage's inputs are leaves. Nothing else reads what a stage
    has received: the stage before it has the original, and if the stage itself has saved it for its backward, autograd
    says so as it does in one process.
    """
    return tuple(
        _Same.apply(value)  # type: ignore[no-untyped-call]
        if isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.is_leaf
        and torch.is_grad_enabled()
        else value
        for value in inputs
    )


@dataclass(frozen=True)
class Cut:
    """How an ``nn.Sequential`` is split.

    ``stages[s]`` names the children of stage ``s``; each entry of ``tied`` lists the names of one shared parameter.
    """

    stages: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]

    not_evaluated: ClassVar[str] = ""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter or a buffer."""
        child = name.partition(".")[0]
        return tuple(stage for stage, children in enumerate(self.stages) if child in children)

    def signature(self) -> str:
        """A text that must be equal on all ranks."""
        return repr(self.stages)

    def module(self, model: nn.Module, stage: int) -> nn.Module:
        """The children of a stage, under their own names."""
        stage_module = nn.Sequential()
        for name in self.stages[stage]:
            stage_module.add_module(name, model.get_submodule(name))
        stage_module.training = model.training
        stage_module.register_forward_pre_hook(_make_changeable)
        return stage_module

    def arguments(self, stage: int) -> dict[str, Any]:
        """No arguments for ``PipelineStage``: torch infers the shapes between stages."""
        del stage
        return {}

    def inputs(self, batch: Any, micro_batches: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch."""
        del micro_batches
        return (batch,)

    def output(self, result: Any, *, training: bool) -> Any:
        """What the model would return."""
        del training
        return result


def _make_changeable(_stage: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return changeable(inputs)


def cut(model: nn.Module, stages: int, split_points: Sequence[str] = ()) -> Cut:
    """Split ``model`` into ``stages`` that begin at the children ``split_points``, or evenly without them.

    Raises UnsupportedError for a module other than ``nn.Sequential``; PlanError for points that are not its children,
    are out of order, or do not match ``stages``.
    """
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            "only torch.nn.Sequential can be split into stages without an example batch",
            got=type(model).__name__,
            fix="Pass example_batch to headway.parallelize: a batch like those for train_step.",
        )
    names = [name for name, _ in _children(model)]
    begins = _at_points(names, stages, split_points) if split_points else _balanced(model, stages)
    ends = [*begins[1:], len(names)]
    parts = tuple(tuple(names[begin:end]) for begin, end in zip(begins, ends, strict=True))
    model_cut = Cut(parts, _tied(model))
    _check_buffers(model, model_cut)
    return model_cut


def _children(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """All children in order, repeated ones included (``named_children`` skips those)."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in modules if name and "." not in name]


def _check_buffers(model: nn.Module, model_cut: Cut) -> None:
    """Raise UnsupportedError if several stages share a buffer: each rank would change its own copy."""
    stages: dict[int, set[int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        stages.setdefault(id(buffer), set()).update(model_cut.stages_of(name))
        if len(stages[id(buffer)]) > 1:
            raise UnsupportedError(
                "several stages share a buffer", got=name, expected="buffers that only one stage uses",
                fix="Construct a separate module for each place in the Sequential, or split after the last.",
            )  # fmt: skip


def _at_points(names: Sequence[str], stages: int, points: Sequence[str]) -> list[int]:
    unknown = [point for point in points if point not in names]
    if unknown:
        raise PlanError(
            "split_points names modules that the model does not have", got=", ".join(unknown),
            expected=f"children of the model: {', '.join(names[:16])}{' …' if len(names) > 16 else ''}",
            fix="To split inside a child, pass example_batch." * any("." in point for point in unknown),
        )  # fmt: skip
    begins = [0, *(names.index(point) for point in points)]
    if len(begins) != stages or any(earlier >= later for earlier, later in pairwise(begins)):
        raise PlanError(
            "split_points do not give one stage per rank",
            got=", ".join(points), expected=f"{stages - 1} children other than the first, in order",
        )  # fmt: skip
    return begins


def _balanced(model: nn.Sequential, stages: int) -> list[int]:
    """Balances stages by parameters: nothing else is known about a module that was not recorded."""
    layers = []
    for name, child in _children(model):
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in child.parameters())
        layers.append(SplitLayer(name, size_bytes + 1.0, 2.0 * size_bytes + 1.0, size_bytes, cut_bytes=0))
    splits = split(layers, stages, 8 * stages, lambda _stage, _bytes: 0.0)
    if not splits:
        raise PlanError(
            "the model has fewer children than there are stages", got=f"{len(layers)}", expected=f"at least {stages}",
        )  # fmt: skip
    return [0, *splits[0].ends[:-1]]


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(aliases) for aliases in names.values() if len(aliases) > 1)


def split_up(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as (positional, keyword) arguments: a dict is keywords, a tuple or list is positional."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def micro_batch_of(example: tuple[Any, Any], micro_batches: int) -> tuple[Any, Any]:
    """The first micro-batch of ``example``. Raises UserError unless it splits into equal micro-batches."""
    tensors = [leaf for leaf in leaves(example) if isinstance(leaf, torch.Tensor)]
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1 or 0 in rows or next(iter(rows)) % micro_batches:
        raise UserError(
            "cannot split example_batch into micro-batches of equal size", got=said_of(tensors) or "no tensor",
            expected=f"tensors whose first dimension is the same multiple of {micro_batches}",
            fix="Expand tensors that all samples share along the first dimension.",
        )  # fmt: skip
    size = next(iter(rows)) // micro_batches
    first: tuple[Any, Any] = mapped(
        lambda value: value[:size] if isinstance(value, torch.Tensor) else value, example
    )
    return first


def form_of(example: Any) -> Any:
    """The structure of a batch without its tensors, as text."""
    return repr(mapped(lambda leaf: "tensor" if isinstance(leaf, torch.Tensor) else leaf, example))


def said_of(tensors: Sequence[torch.Tensor]) -> str:
    """The dtypes and shapes of ``tensors``, as text."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)


class TracedStage(nn.Module):
    """One stage: the submodules, parameters and buffers that its calls need, under their names in the model.

    In training and in evaluation mode it makes the calls recorded in that mode.
    """

    def __init__(self, programs: Mapping[bool, Program], device: torch.device) -> None:
        super().__init__()
        self.__dict__.update(_headway_programs=programs, _headway_device=device)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run this stage's calls on ``inputs``; returns a tensor, or a tuple of several."""
        program: Program | None = self.__dict__["_headway_programs"].get(self.training)
        if program is None:
            raise UserError(
                "this pipeline cannot evaluate, but its stage is in evaluation mode", fix="Call train()."
            )
        return program.run(self, changeable(inputs), self.__dict__["_headway_device"])


def traced_stage(
    model: nn.Module, programs: Mapping[bool, Program], names: frozenset[str], device: torch.device
) -> TracedStage:
    """Build the stage from the submodules, parameters and buffers of ``model``."""
    stage = TracedStage(programs, device)
    modules = {submodule.name for program in programs.values() for submodule in submodules_of(program)}
    called = {id(model.get_submodule(name)) for name in modules}
    for name, module in model.named_modules(remove_duplicate=False):  # outer ones first
        if id(module) in called:
            _owner(stage, name).add_module(name.rpartition(".")[2], module)
    have = {name for name, _ in state_of(stage)}
    stateful = model.state_dict(keep_vars=True).keys()
    for name, tensor in state_of(model):
        if name in names - have:
            owner, attribute = _owner(stage, name), name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(attribute, tensor)
            else:
                owner.register_buffer(attribute, tensor, persistent=name in stateful)
    stage.training = model.training
    return stage


def submodules_of(program: Program) -> Iterator[Submodule]:
    """The submodules that a stage calls."""
    return (use for call in program.calls for use in call.uses(Submodule))


def names_of(model: nn.Module, programs: Sequence[Mapping[bool, Program]]) -> tuple[frozenset[str], ...]:
    """The parameters and buffers of each stage. Unused ones go where an alias is used, or to the first stage."""
    state = [*state_of(model)]
    modules = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    names_of_stages: list[set[str]] = []
    for stage_programs in programs:
        called = {
            modules[submodule.name]
            for program in stage_programs.values()
            for submodule in submodules_of(program)
        }
        direct = {
            use.name
            for program in stage_programs.values()
            for call in program.calls
            for use in call.uses(Attribute)
        }
        names_of_stages.append(
            {
                name
                for name, _ in state
                if name in direct or any(modules[owner] in called for owner in _owners(name))
            }
        )
    for name, tensor in state:
        if not any(name in stage_names for stage_names in names_of_stages):
            same = {alias for alias, state_tensor in state if state_tensor is tensor}
            next((names for names in names_of_stages if names & same), names_of_stages[0]).add(name)
    return tuple(map(frozenset, names_of_stages))


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, once for each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def dots_in(name: str) -> Iterator[int]:
    """The positions of the dots in a name: where the names of its enclosing modules end."""
    return (at for at, character in enumerate(name) if character == ".")


def _owners(name: str) -> Iterator[str]:
    """The names of the modules that contain a parameter or a buffer, without the model itself."""
    return (name[:at] for at in dots_in(name))


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The module that holds ``name``; creates empty modules on the way."""
    owner = root
    for part in name.split(".")[:-1]:
        inner = getattr(owner, part, None)
        if inner is None:
            inner = nn.Module()
            owner.add_module(part, inner)
        owner = inner
    return owner


def tied_in(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """All names of each parameter: several where it is shared."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(aliases) for aliases in names.values())


_MOST_ATTEMPTS = 64


@dataclass(frozen=True)
class TracedCut:
    """A model split into stages by the calls of its forward.

    ``tied`` lists the names of each parameter. ``not_evaluated`` says why it cannot evaluate; "" if it can.
    """

    programs: tuple[Mapping[bool, Program], ...]
    boundaries: tuple[tuple[Like, ...], ...]
    names: tuple[frozenset[str], ...]
    tied: tuple[tuple[str, ...], ...]
    trained: frozenset[str]
    outputs: Mapping[bool, Any]
    last: tuple[Like, ...]
    example: tuple[Any, tuple[Like, ...]]
    ambience: Ambience
    device: torch.device
    not_evaluated: str = ""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that hold a parameter or a buffer."""
        return tuple(stage for stage, stage_names in enumerate(self.names) if name in stage_names)

    def signature(self) -> str:
        """A text that must be equal on all ranks."""
        return repr(([sorted(name) for name in self.names], self.boundaries, self.ambience))

    def check(self, stage: nn.Module) -> None:
        """Raise UserError if autocast or ``requires_grad`` differ from the recording."""
        now = Ambience.now(self.device)
        if now.autocast != self.ambience.autocast:
            raise UserError(
                "autocast differs from when the model was split into stages",
                got=f"autocast to {now.autocast or 'nothing'}", expected=f"to {self.ambience.autocast or 'nothing'}",
                fix="Call parallelize, train_step and evaluate under the same torch.autocast.",
            )  # fmt: skip
        changed = [
            name
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad != (name in self.trained)
        ]
        if changed:
            raise UserError(
                "requires_grad changed after the model was split into stages",
                got=", ".join(changed[:4]), fix="Freeze parameters before parallelize.",
            )  # fmt: skip

    def module(self, model: nn.Module, stage: int) -> nn.Module:
        """The stage, of the submodules, parameters and buffers of ``model``."""
        return traced_stage(model, self.programs[stage], self.names[stage], self.device)

    def arguments(self, stage: int) -> dict[str, tuple[torch.Tensor, ...]]:
        """The arguments of ``PipelineStage``: meta tensors like its inputs and outputs."""
        into = self.boundaries[stage - 1] if stage else self.example[1]
        out = self.boundaries[stage] if stage < len(self.boundaries) else self.last
        return {
            "input_args": tuple(like.tensor() for like in into),
            "output_args": tuple(like.tensor() for like in out),
        }

    def inputs(self, batch: Any, micro_batches: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch. Raises UserError if its structure, shapes or dtypes differ from the example's."""
        form, likes = self.example
        arguments = split_up(batch)
        tensors = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
        shapes = [(micro_batches * like.shape[0], *like.shape[1:]) for like in likes]
        if form_of(arguments) != form or [tuple(tensor.shape) for tensor in tensors] != shapes or any(
            tensor.dtype != like.dtype for tensor, like in zip(tensors, likes, strict=True)
        ):  # fmt: skip
            raise UserError(
                "the batch does not match example_batch",
                got=said_of(tensors), expected=", ".join(str(list(shape)) for shape in shapes),
                fix="Use batches of one shape (drop_last=True in a DataLoader) and an example of that shape.",
            )  # fmt: skip
        return tuple(tensors)

    def output(self, result: Any, *, training: bool) -> Any:
        """Rebuild the model's output from the tensors of the last stage."""
        values = self.programs[-1][training].outputs
        held = dict(zip(values, result if isinstance(result, tuple) else (result,), strict=True))
        return mapped(
            lambda leaf: held.get(leaf, leaf) if _is_hashable(leaf) else leaf, self.outputs[training]
        )


def traced_cut(
    model: nn.Module,
    stages: int,
    points: Sequence[str],
    example: Any,
    micro_batches: int,
    device: torch.device,
) -> TracedCut:
    """Split ``model`` into ``stages`` at the modules ``points``, at its calls of ``pipe_split``, or evenly.

    ``example`` is a batch like those for ``train_step``. Raises UnsupportedError for a module that cannot be traced or
    split, PlanError for points where it cannot be split, UserError for an example that does not split evenly.
    """
    _check_plain(model)
    example = split_up(example)
    args, kwargs = micro_batch_of(example, micro_batches)
    tracer = _Tracer(model, args, kwargs, device)
    dividing.check_names(model, points)
    with _mode(model, training=True):
        inside, begins_at = tracer.where(points, stages)
        recording = tracer.record(inside)
        begins = begins_at(recording)
        training = dividing.divide(recording, begins)
    programs, outputs = [training.programs], {True: recording.output}
    not_evaluated = ""
    try:
        with _mode(model, training=False):
            evaluated = tracer.record(inside)
            evaluation = dividing.divide(evaluated, begins_at(evaluated))
        if _plain(evaluation.boundaries) != _plain(training.boundaries):
            not_evaluated = "its stages exchange different tensors in evaluation than in training"
        programs.append(evaluation.programs)
        outputs[False] = evaluated.output
    except (UnsupportedError, PlanError) as failure:
        not_evaluated = str(failure)
    by_stage = [
        dict(zip((True, False), stage_programs, strict=False))
        for stage_programs in zip(*programs, strict=True)
    ]
    names = names_of(model, by_stage)
    _check_statistics(model, by_stage)
    trained = frozenset(
        name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad
    )
    likes = tuple(recording.likes[input_] for input_ in recording.inputs)
    last = tuple(recording.likes[output] for output in recording.outputs())
    return TracedCut(
        tuple(by_stage), training.boundaries, names, tied_in(model), trained, outputs, last, (form_of(example), likes),
        Ambience.now(device), device, not_evaluated,
    )  # fmt: skip


class _Tracer:
    def __init__(self, model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> None:
        self._model, self._args, self._kwargs, self._device = model, args, kwargs, device

    def record(self, inside: set[str], *, split_inside: bool = False) -> Recording:
        return record(self._model, self._args, self._kwargs, inside, self._device, split_inside=split_inside)

    def where(self, points: Sequence[str], stages: int) -> tuple[set[str], Any]:
        """The modules to trace into, and a function from a recording to the calls at which stages begin."""
        model = self._model
        if not points:
            inside = {""}
            for _ in range(_MOST_ATTEMPTS):
                try:
                    recording = self.record(inside, split_inside=True)
                except SplitInsideError as found:
                    inside |= found.names
                    continue
                if recording.marks:
                    return inside, lambda recorded: dividing.at_marks(model, recorded, stages)
                break
            points = self._balanced(stages)
        inside = {point[:at] for point in points for at in dots_in(point)} | {""}
        return inside, lambda recorded: dividing.at_points(model, recorded, points, stages)

    def _balanced(self, stages: int) -> list[str]:
        """Trace into modules that hold more than a stage's share of the parameters, where tracing succeeds."""
        inside = {"", *(name for name, module in self._model.named_modules() if _is_sequential(module))}
        recording, passed_over = self.record(inside), set[str]()
        for _ in range(_MOST_ATTEMPTS):
            name, share = dividing.largest(self._model, recording, passed_over)
            if share <= 1 / stages:
                break
            try:
                recording = self.record(inside | {name})
                inside.add(name)
            except UnsupportedError:
                passed_over.add(name)
        return dividing.balanced(self._model, recording, stages)


# What is refused ------------------------------------------------------------------------------------------


def _check_plain(model: nn.Module) -> None:
    for name, tensor in state_of(model):
        if "DTensor" in type(tensor).__name__ or "DTensor" in type(tensor.data).__name__:
            raise UnsupportedError(
                "cannot split a model with DTensor parameters into stages", got=name, expected="plain tensors",
                fix="Split the model before sharding it.",
            )  # fmt: skip


def _check_statistics(model: nn.Module, programs: Sequence[Mapping[bool, Program]]) -> None:
    """Raise UnsupportedError for running statistics that several stages would each update."""
    seen: dict[str, int] = {}
    for stage, stage_programs in enumerate(programs):
        for name in {
            submodule.name for program in stage_programs.values() for submodule in submodules_of(program)
        }:
            if seen.setdefault(name, stage) == stage:
                continue
            if any(
                getattr(module, "track_running_stats", False)
                for module in model.get_submodule(name).modules()
            ):
                raise UnsupportedError(
                    "several stages call a module with running statistics; each would update its own copy",
                    got=name, fix="Choose split_points so that only one stage calls it.",
                )  # fmt: skip


# Small things ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch the model's mode for a while. In training, modules in evaluation mode (frozen statistics) stay so."""
    before = [(module, module.training) for module in model.modules()]
    if not training or not model.training:
        model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


def _plain(boundaries: Sequence[Sequence[Like]]) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    return [[(like.shape, like.dtype) for like in boundary] for boundary in boundaries]


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_hashable(value: Any) -> bool:
    return type(value).__hash__ is not None
