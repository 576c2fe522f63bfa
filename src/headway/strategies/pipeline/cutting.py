"""Cuts a module into the stages of a pipeline: an ``nn.Sequential`` by its children, others by the calls of their forward.

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
        return received.detach()  # no view, for autograd: those of a function cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def changeable(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The same tensors in the same memory, as results of an operation where they are leaves with gradients.

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
    """``stages[s]`` are the names of the children of stage ``s``; ``tied`` are names of one parameter in several."""

    stages: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]

    not_evaluated: ClassVar[str] = ""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stage of a parameter or a buffer."""
        child = name.partition(".")[0]
        return tuple(stage for stage, children in enumerate(self.stages) if child in children)

    def signature(self) -> str:
        """What all ranks have to agree on."""
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
        """What ``PipelineStage`` is told: torch finds out itself what stages hand on."""
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
    """Cut ``model`` into ``stages`` at ``split_points``, each the child at which a stage begins, or evenly.

    Raises UnsupportedError for a module other than ``nn.Sequential``, which calls its children one after the other,
    PlanError for points that are none of its children, not in their order, or of another number of stages.
    """
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            "only a torch.nn.Sequential is cut into stages without an example of a batch",
            got=type(model).__name__,
            fix="Give parallelize example_batch, a batch as train_step will be given them.",
        )
    names = [name for name, _ in _children(model)]
    begins = _at_points(names, stages, split_points) if split_points else _balanced(model, stages)
    ends = [*begins[1:], len(names)]
    parts = tuple(tuple(names[begin:end]) for begin, end in zip(begins, ends, strict=True))
    model_cut = Cut(parts, _tied(model))
    _check_buffers(model, model_cut)
    return model_cut


def _children(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """All of them in order: ``named_children`` leaves out a module that comes again."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in modules if name and "." not in name]


def _check_buffers(model: nn.Module, model_cut: Cut) -> None:
    """Raise UnsupportedError where stages on several ranks would each change a buffer of their own."""
    stages: dict[int, set[int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        stages.setdefault(id(buffer), set()).update(model_cut.stages_of(name))
        if len(stages[id(buffer)]) > 1:
            raise UnsupportedError(
                "several stages share a buffer", got=name, expected="buffers that one stage has",
                fix="Construct a module for each place in the Sequential, or cut behind the last.",
            )  # fmt: skip


def _at_points(names: Sequence[str], stages: int, points: Sequence[str]) -> list[int]:
    unknown = [point for point in points if point not in names]
    if unknown:
        raise PlanError(
            "the plan begins stages at modules that the model does not have", got=", ".join(unknown),
            expected=f"children of the model: {', '.join(names[:16])}{' …' if len(names) > 16 else ''}",
            fix="Modules inside of them need example_batch." * any("." in point for point in unknown),
        )  # fmt: skip
    begins = [0, *(names.index(point) for point in points)]
    if len(begins) != stages or any(earlier >= later for earlier, later in pairwise(begins)):
        raise PlanError(
            "the plan's split_points do not cut the model into as many stages as there are ranks",
            got=", ".join(points), expected=f"{stages - 1} children but the first, in their order",
        )  # fmt: skip
    return begins


def _balanced(model: nn.Sequential, stages: int) -> list[int]:
    """Time is taken to be in proportion to parameters: nothing else is known of a module that was not recorded."""
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
    """A batch as positional and keyword arguments: a dict has the latter, a tuple or a list the former."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def micro_batch_of(example: tuple[Any, Any], micro_batches: int) -> tuple[Any, Any]:
    """The first micro-batch. Raises UserError where all are not of one size."""
    tensors = [leaf for leaf in leaves(example) if isinstance(leaf, torch.Tensor)]
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1 or 0 in rows or next(iter(rows)) % micro_batches:
        raise UserError(
            "example_batch does not split into micro-batches of one size", got=said_of(tensors) or "no tensor",
            expected=f"tensors of one number of samples, a multiple of {micro_batches}, in their first dimension",
            fix="Expand what holds for all samples to each of them.",
        )  # fmt: skip
    size = next(iter(rows)) // micro_batches
    first: tuple[Any, Any] = mapped(
        lambda value: value[:size] if isinstance(value, torch.Tensor) else value, example
    )
    return first


def form_of(example: Any) -> Any:
    """All of a batch but its tensors."""
    return repr(mapped(lambda leaf: "tensor" if isinstance(leaf, torch.Tensor) else leaf, example))


def said_of(tensors: Sequence[torch.Tensor]) -> str:
    """Their types and shapes."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)


class TracedStage(nn.Module):
    """One stage: the submodules, parameters and buffers of a model that its calls need, under their own names.

    It makes the calls of the forward in training or in evaluation, as its mode is.
    """

    def __init__(self, programs: Mapping[bool, Program], device: torch.device) -> None:
        super().__init__()
        self.__dict__.update(_headway_programs=programs, _headway_device=device)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Make this stage's calls of what it is given; returns a tensor or a tuple of several."""
        program: Program | None = self.__dict__["_headway_programs"].get(self.training)
        if program is None:
            raise UserError(
                "this pipeline has no evaluation, and its stage is in that mode", fix="Call train()."
            )
        return program.run(self, changeable(inputs), self.__dict__["_headway_device"])


def traced_stage(
    model: nn.Module, programs: Mapping[bool, Program], names: frozenset[str], device: torch.device
) -> TracedStage:
    """The stage, of the submodules, parameters and buffers of ``model``."""
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
    """The parameters and buffers of each stage. What none uses is where it has another name, or on the first."""
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
    """Parameters and buffers, under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def dots_in(name: str) -> Iterator[int]:
    """Where the names of the modules around one end."""
    return (at for at, character in enumerate(name) if character == ".")


def _owners(name: str) -> Iterator[str]:
    """The modules that a parameter or a buffer is inside of, but the model itself."""
    return (name[:at] for at in dots_in(name))


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The module that has the parameter, buffer or module of that name, empty ones where there are none."""
    owner = root
    for part in name.split(".")[:-1]:
        inner = getattr(owner, part, None)
        if inner is None:
            inner = nn.Module()
            owner.add_module(part, inner)
        owner = inner
    return owner


def tied_in(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(aliases) for aliases in names.values())


_MOST_ATTEMPTS = 64


@dataclass(frozen=True)
class TracedCut:
    """A model cut into stages; ``stages_of[name]`` has those of each parameter and buffer.

    ``tied`` are names of one parameter. ``not_evaluated`` says why there is no evaluation; "" where there is one.
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
        """The stages that have a parameter or a buffer."""
        return tuple(stage for stage, stage_names in enumerate(self.names) if name in stage_names)

    def signature(self) -> str:
        """What all ranks have to agree on."""
        return repr(([sorted(name) for name in self.names], self.boundaries, self.ambience))

    def check(self, stage: nn.Module) -> None:
        """Raise UserError where a step would compute in other types, or gradients of others, than was recorded."""
        now = Ambience.now(self.device)
        if now.autocast != self.ambience.autocast:
            raise UserError(
                "stages hand on other types under autocast than without, and were cut for the other",
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
                "requires_grad of parameters was changed after the model had been cut into stages",
                got=", ".join(changed[:4]), fix="Freeze parameters before parallelize.",
            )  # fmt: skip

    def module(self, model: nn.Module, stage: int) -> nn.Module:
        """The stage, of the submodules, parameters and buffers of ``model``."""
        return traced_stage(model, self.programs[stage], self.names[stage], self.device)

    def arguments(self, stage: int) -> dict[str, tuple[torch.Tensor, ...]]:
        """What ``PipelineStage`` is told about what the stage is given and hands on."""
        into = self.boundaries[stage - 1] if stage else self.example[1]
        out = self.boundaries[stage] if stage < len(self.boundaries) else self.last
        return {
            "input_args": tuple(like.tensor() for like in into),
            "output_args": tuple(like.tensor() for like in out),
        }

    def inputs(self, batch: Any, micro_batches: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch. Raises UserError for one that is not like the example."""
        form, likes = self.example
        arguments = split_up(batch)
        tensors = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
        shapes = [(micro_batches * like.shape[0], *like.shape[1:]) for like in likes]
        if form_of(arguments) != form or [tuple(tensor.shape) for tensor in tensors] != shapes or any(
            tensor.dtype != like.dtype for tensor, like in zip(tensors, likes, strict=True)
        ):  # fmt: skip
            raise UserError(
                "a batch is not like example_batch, of which the model was cut into stages",
                got=said_of(tensors), expected=", ".join(str(list(shape)) for shape in shapes),
                fix="Give batches of one shape (drop_last=True in a DataLoader), and an example of that.",
            )  # fmt: skip
        return tuple(tensors)

    def output(self, result: Any, *, training: bool) -> Any:
        """What the model would return, of the tensors of its last stage."""
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
    """Cut ``model`` into ``stages`` that begin at the modules ``points``, or at calls of ``pipe_split``, or evenly.

    ``example`` is a batch as ``train_step`` is given them. Raises UnsupportedError for a module that cannot be traced
    or divided, PlanError for points where it cannot be cut, UserError for an example that does not split evenly.
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
            not_evaluated = "its stages hand on other tensors in evaluation than in training"
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
        """Which modules to look into, and what says of a recording where stages begin in it."""
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
        """Look into what has more than a stage's share of the parameters, as far as that can be traced."""
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
                "a model of DTensors is not cut into stages", got=name, expected="plain tensors",
                fix="Cut the model before it is sharded.",
            )  # fmt: skip


def _check_statistics(model: nn.Module, programs: Sequence[Mapping[bool, Program]]) -> None:
    """Statistics that each stage would have its own of."""
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
                    "a module that several stages call keeps statistics, and each would have its own",
                    got=name, fix="Choose split_points so that one stage calls it.",
                )  # fmt: skip


# Small things ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Have the model in a mode. In training, modules that are in the other one (frozen statistics) stay so."""
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
