"""Divides a recorded forward among pipeline stages: the calls of each stage, and the tensors between stages."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from headway.errors import InternalError, PlanError, UnsupportedError
from headway.strategies.pipeline.stage_times import SplitLayer, split
from headway.torch_private.tracing import is_fake, leaves, mapped


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: an input of the forward, or a result of one of its calls."""

    number: int


@dataclass(frozen=True, slots=True)
class Like:
    """The shape, dtype and ``requires_grad`` of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        """That of ``tensor``."""
        return Like(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """Such a tensor on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or a buffer."""

    name: str


@dataclass(frozen=True, slots=True)
class Submodule:
    """A module, or a method of it."""

    name: str
    method: str = ""


@dataclass(frozen=True, slots=True)
class Ambience:
    """Whether gradients are enabled, and the autocast dtype (None without autocast)."""

    gradients: bool
    autocast: torch.dtype | None

    @staticmethod
    def now(device: torch.device) -> Ambience:
        """The current state."""
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return Ambience(torch.is_grad_enabled(), autocast)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Enter this state."""
        kind, enabled = device.type, self.autocast is not None
        gradients = self.gradients and torch.is_grad_enabled()
        with torch.set_grad_enabled(gradients), torch.autocast(kind, self.autocast, enabled=enabled):
            yield


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call; ``args`` and ``kwargs`` hold Value, Attribute and Submodule in place of the real objects.

    ``gives`` are the tensors in its result, in pytree order. ``ambience`` is set if the forward itself changed autocast
    or gradients for this call. ``changes`` are the earlier tensors whose memory it writes to, views included;
    ``mutates`` says that it writes in place at all, ``draws`` that it draws random numbers.
    """

    target: Callable[..., Any] | Submodule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gives: tuple[Value, ...]
    ambience: Ambience | None = None
    changes: tuple[Value, ...] = ()
    mutates: bool = False
    draws: bool = False

    def __post_init__(self) -> None:
        self.__dict__["_uses"] = tuple(leaves((self.target, self.args, self.kwargs)))

    @property
    def first(self) -> Any:
        """Its first argument."""
        return next(iter((*self.args, *self.kwargs.values())), None)

    def uses(self, kind: type[Any]) -> Iterator[Any]:
        """The values, attributes or submodules that it uses."""
        return _of_kind(kind, self.__dict__["_uses"])


def _of_kind(kind: type[Any], values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, slice):
            yield from _of_kind(kind, (value.start, value.stop, value.step))


@dataclass
class Recording:
    """The calls of one forward. ``output`` is what it returns, with values in the places of tensors.

    ``begins`` has the number of calls before each module was first called, ``marks`` that before each ``pipe_split``.
    """

    inputs: tuple[Value, ...]
    calls: list[Call] = field(default_factory=list)
    likes: dict[Value, Like] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)
    marks: list[int] = field(default_factory=list)
    output: Any = None

    def outputs(self) -> tuple[Value, ...]:
        """The distinct tensors that it returns."""
        output_leaves = leaves(self.output)
        return tuple(dict.fromkeys(leaf for leaf in output_leaves if isinstance(leaf, Value)))


@dataclass(frozen=True, eq=False)
class Program:
    """The calls of a stage in order, with its input and output tensors.

    ``hands_on`` describes the tensors that the next stage expects; it is empty for the last stage.
    """

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]
    hands_on: tuple[Like, ...] = ()

    def run(self, module: nn.Module, inputs: Sequence[torch.Tensor], device: torch.device) -> Any:
        """Run the calls with the submodules, parameters and buffers of ``module``.

        Returns one tensor, or a tuple of several. Tensors that only pass through are returned as views, because a
        stage's inputs have gradients of their own.
        """
        held: dict[Value, torch.Tensor] = dict(zip(self.inputs, inputs, strict=True))

        def filled(item: Any) -> Any:
            match item:
                case Value():
                    return held[item]
                case Attribute(name):
                    owner, _, attribute = name.rpartition(".")
                    return getattr(module.get_submodule(owner), attribute)
                case Submodule(name, method):
                    submodule = module.get_submodule(name)
                    return getattr(submodule, method) if method else submodule
            return item

        for call, done in zip(self.calls, self._done_with(), strict=True):
            target = filled(call.target)
            with call.ambience.on(device) if call.ambience else contextlib.nullcontext():
                result = target(*mapped(filled, call.args), **mapped(filled, call.kwargs))
            if call.gives:
                tensors = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
                held.update(zip(call.gives, tensors, strict=True))
            del result
            for item in done:
                del held[item]
        outputs = tuple(self._handed_on(value, held[value]) for value in self.outputs)
        for like, tensor in zip(self.hands_on, outputs, strict=False):
            if (like.shape, like.dtype) != (tuple(tensor.shape), tensor.dtype) or is_fake(tensor):
                raise InternalError(f"a stage hands on {tensor.dtype} {list(tensor.shape)} instead of {like}")
        return outputs if len(outputs) > 1 else outputs[0]

    def _handed_on(self, value: Value, tensor: torch.Tensor) -> torch.Tensor:
        if value in self.inputs and tensor.requires_grad:
            tensor = tensor.view_as(tensor)
        return tensor.contiguous() if self.hands_on else tensor

    def _done_with(self) -> list[tuple[Value, ...]]:
        """For each call, the values that are no longer needed after it."""
        last_uses = self.__dict__.get("_done")
        if last_uses is None:
            later: set[Value] = {*self.outputs}
            last_uses = []
            for call in reversed(self.calls):
                here = {*call.uses(Value), *call.gives}
                last_uses.append(tuple(sorted(here - later, key=lambda value: value.number)))
                later |= here
            last_uses.reverse()
            self.__dict__["_done"] = last_uses
        return last_uses


_SHOWN = 16


@dataclass(frozen=True)
class Divided:
    """The program of every stage, and the tensors at each boundary between stages."""

    programs: tuple[Program, ...]
    boundaries: tuple[tuple[Like, ...], ...]


def divide(recording: Recording, begins: Sequence[int]) -> Divided:
    """Give stage ``s`` the calls from ``begins[s]`` up to those of the next stage.

    A tensor that a later stage needs passes through every stage in between. Tensors that depend on no input, draw no
    random numbers and are not changed (masks, positions) are recomputed by every stage that needs them. Raises
    UnsupportedError if a stage would change a received tensor in place while another shares its memory.
    """
    calls = recording.calls
    again = _computed_again(recording)
    makers = {value: call for call in calls for value in call.gives}
    ends = [*begins[1:], len(calls)]
    spans = [range(begin, end) for begin, end in zip(begins, ends, strict=True)]
    needed: set[Value] = set(recording.outputs())
    inputs: list[tuple[Value, ...]] = []
    shares: list[tuple[Call, ...]] = []
    for span in reversed(spans):
        stage_calls = [calls[at] for at in span]
        repeated = _needed_again(stage_calls, needed if span is spans[-1] else set(), again, makers)
        share = (*(call for call in repeated if call not in stage_calls), *stage_calls)
        produced = {value for call in share for value in call.gives}
        used = {value for call in share for value in call.uses(Value)}
        needed = {value for value in (needed | used) - produced if makers.get(value) not in again}
        inputs.append(tuple(sorted(needed, key=lambda value: value.number)))
        shares.append(tuple(share))
    inputs.reverse()
    shares.reverse()
    inputs[0] = recording.inputs
    outputs = [*inputs[1:], recording.outputs()]
    for input_, share in zip(inputs[1:], shares[1:], strict=True):
        changed = next((call for call in share if len(set(call.changes) & set(input_)) > 1), None)
        if changed is not None:
            raise UnsupportedError(
                "a stage would modify a received tensor in place while another received tensor shares its memory",
                got=getattr(changed.target, "__name__", "") or getattr(changed.target, "name", "a call"),
                fix="Choose other split_points, or replace the in-place operation.",
            )  # fmt: skip
    boundaries = [tuple(recording.likes[value] for value in out) for out in outputs[:-1]]
    programs = map(Program, inputs, shares, outputs, [*boundaries, ()])
    return Divided(tuple(programs), tuple(boundaries))


def _computed_again(recording: Recording) -> Sequence[Call]:
    """The calls that any stage can repeat by itself."""
    fresh: set[Value] = set()
    repeatable = []
    for call in recording.calls:
        by_itself = not isinstance(call.target, Submodule) and not call.draws
        if (
            not by_itself
            or any(call.uses(Submodule))
            or any(value not in fresh for value in call.uses(Value))
        ):
            if any(value in fresh for value in call.changes):
                return ()  # nor what shares its memory
            continue
        if call.mutates or not call.gives:
            return ()
        fresh.update(call.gives)
        repeatable.append(call)
    return repeatable


def _needed_again(
    stage_calls: Sequence[Call], more: set[Value], again: Sequence[Call], makers: dict[Value, Call]
) -> list[Call]:
    """Which of ``again`` a stage of the calls ``stage_calls`` needs, in their order."""
    wanted, left = set[Call](), [*(value for call in stage_calls for value in call.uses(Value)), *more]
    while left:
        call = makers.get(left.pop())
        if call is None or call not in again or call in wanted:
            continue
        wanted.add(call)
        left += call.uses(Value)
    return [call for call in again if call in wanted]


# Where stages begin ---------------------------------------------------------------------------------------


def check_names(model: nn.Module, points: Sequence[str]) -> None:
    """Raise PlanError for points that are not modules of the model, with similar names."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for point in points:
        if point in names:
            continue
        near = difflib.get_close_matches(point, names, 3, 0.5) or names[:_SHOWN]
        raise PlanError(
            "split_points names modules that the model does not have", got=point,
            expected=f"names of its modules, such as {', '.join(near)}",
        )  # fmt: skip


def at_points(model: nn.Module, recording: Recording, points: Sequence[str], stages: int) -> list[int]:
    """The number of the call at which each stage begins.

    Raises PlanError for modules that forward does not call, calls in another order, or that do not match ``stages``.
    """
    for point in points:
        if point not in recording.begins:
            inner = [name for name in recording.begins if name.startswith(f"{point}.")]
            raise PlanError(
                "split_points names a module that forward does not call", got=point,
                expected=f"a module that forward calls, such as {_listed(inner or called(recording))}",
            )  # fmt: skip
    begins = [0, *(recording.begins[point] for point in points)]
    if len(begins) != stages or any(earlier >= later for earlier, later in pairwise(begins)):
        raise PlanError(
            "split_points do not give one stage per rank",
            got=", ".join(points) or "none",
            expected=f"{stages - 1} modules in the order in which forward calls them, not the first",
        )  # fmt: skip
    check_parameters(model, recording, begins)
    return begins


def at_marks(model: nn.Module, recording: Recording, stages: int) -> list[int]:
    """The same for calls of ``pipe_split``."""
    begins = [0, *recording.marks]
    if len(begins) != stages or any(earlier >= later for earlier, later in pairwise(begins)):
        raise PlanError(
            "the model's pipe_split() calls do not give one stage per rank",
            got=f"{len(recording.marks)} calls", expected=f"{stages - 1}, with computation between them",
            fix="Give split_points in the plan: they replace pipe_split().",
        )  # fmt: skip
    check_parameters(model, recording, begins)
    return begins


def check_parameters(model: nn.Module, recording: Recording, begins: Sequence[int]) -> None:
    """Raise PlanError for a stage that has no parameters."""
    for stage, (begin, end) in enumerate(pairwise([*begins, len(recording.calls)])):
        if not any(_sizes(model, recording.calls[begin:end]).values()):
            raise PlanError(
                "a stage has no parameters to train", got=f"stage {stage}",
                expected="split_points with parameters after each of them",
            )  # fmt: skip


def called(recording: Recording) -> list[str]:
    """The modules at which a stage could begin: all that forward calls except the first."""
    first = next((at for at, call in enumerate(recording.calls) if any(call.uses(Submodule))), 0)
    places: dict[int, str] = {}
    for name, at in recording.begins.items():
        places.setdefault(at, name)
    return [places[at] for at in sorted(places) if at > first]


def balanced(model: nn.Module, recording: Recording, stages: int) -> list[str]:
    """Choose modules at which stages begin, so that stages have about the same number of parameters.

    Splits only where a single tensor with gradients passes on. Raises PlanError if there are too few such places.
    """
    names = called(recording)
    begins = [0, *(recording.begins[name] for name in names), len(recording.calls)]
    layers = []
    for begin, end in pairwise(begins):
        size_bytes = sum(_sizes(model, recording.calls[begin:end]).values())
        is_place = end < len(recording.calls) and _handed_on(recording, end) == 1
        layers.append(
            SplitLayer(
                "", size_bytes + 1.0, 2.0 * size_bytes + 1.0, size_bytes, cut_bytes=0 if is_place else None
            )
        )
    for best in split(layers, stages, 8 * stages, lambda _stage, _bytes: 0.0):
        return [names[end - 1] for end in best.ends[:-1]]
    raise PlanError(
        "cannot split the model evenly: too few places where a single tensor passes on",
        got=type(model).__name__, expected=f"{stages} stages",
        fix=f"Choose split_points from {_listed(names)}." if names else "Train it with data parallelism.",
    )  # fmt: skip


def largest(model: nn.Module, recording: Recording, passed_over: set[str]) -> tuple[str, float]:
    """The untraced module with the largest share of the parameters that could be traced into, and that share."""
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) or 1
    best = ("", 0.0)
    for call in recording.calls:
        if not isinstance(call.target, Submodule) or call.target.name in passed_over:
            continue
        module = model.get_submodule(call.target.name)
        if type(module).__module__.startswith("torch.") or not any(module.children()):
            continue
        share = sum(_sizes(model, [call]).values()) / total
        best = max(best, (call.target.name, share), key=lambda candidate: candidate[1])
    return best


def _handed_on(recording: Recording, begin: int) -> int:
    """How many tensors with gradients a stage that begins at call ``begin`` would receive."""
    boundary = divide(recording, [0, begin]).boundaries[0]
    return sum(like.requires_grad for like in boundary)


def _sizes(model: nn.Module, calls: Sequence[Call]) -> dict[int, int]:
    """The sizes in bytes of the parameters that calls use, by ``id``."""
    sizes: dict[int, int] = {}
    for call in calls:
        parameter_lists = [model.get_submodule(use.name).parameters() for use in call.uses(Submodule)]
        for parameters in parameter_lists:
            sizes.update(
                {id(parameter): parameter.numel() * parameter.element_size() for parameter in parameters}
            )
        for attribute in call.uses(Attribute):
            owner, _, name = attribute.name.rpartition(".")
            tensor = getattr(model.get_submodule(owner), name)
            if isinstance(tensor, nn.Parameter):
                sizes[id(tensor)] = tensor.numel() * tensor.element_size()
    return sizes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
