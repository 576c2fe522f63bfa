"""A forward as the calls that it makes: of submodules, and of functions of torch between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headway.errors import InternalError
from headway.torch_private.tracing import is_fake, leaves, mapped


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: an input of the forward, or what one of its calls gave."""

    number: int


@dataclass(frozen=True, slots=True)
class Like:
    """What a value is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        """What ``tensor`` is like."""
        return Like(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """One without memory."""
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
    """Whether gradients are computed, and in which type operations are carried out (None: in those of their inputs)."""

    gradients: bool
    autocast: torch.dtype | None

    @staticmethod
    def now(device: torch.device) -> Ambience:
        """What is in force."""
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return Ambience(torch.is_grad_enabled(), autocast)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Have it in force."""
        kind, enabled = device.type, self.autocast is not None
        gradients = self.gradients and torch.is_grad_enabled()
        with torch.set_grad_enabled(gradients), torch.autocast(kind, self.autocast, enabled=enabled):
            yield


@dataclass(frozen=True, eq=False)
class Call:
    """One call: ``args`` and ``kwargs`` have values, attributes and submodules in the places of what they stand for.

    ``gives`` are the tensors in its result, in the order in which torch takes containers apart. ``ambience`` is what
    the forward itself has put in force for it, where that is not what was in force around the forward. ``changes`` are
    the earlier tensors whose memory it writes to, views included; ``mutates`` says that it writes in place at all.
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
        """The values, attributes or submodules that it needs."""
        return _of_kind(kind, self.__dict__["_uses"])


def _of_kind(kind: type[Any], found: Iterable[Any]) -> Iterator[Any]:
    for each in found:
        if isinstance(each, kind):
            yield each
        elif isinstance(each, slice):
            yield from _of_kind(kind, (each.start, each.stop, each.step))


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
        """The tensors that it returns, each once."""
        found = leaves(self.output)
        return tuple(dict.fromkeys(each for each in found if isinstance(each, Value)))


@dataclass(frozen=True, eq=False)
class Program:
    """The calls of a stage in their order; ``inputs`` and ``outputs`` are what it is given and what it gives.

    ``hands_on`` is what the next stage expects; none does of the last.
    """

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]
    hands_on: tuple[Like, ...] = ()

    def run(self, module: nn.Module, given: Sequence[torch.Tensor], device: torch.device) -> Any:
        """Carry it out on the submodules, parameters and buffers of ``module``.

        Returns one tensor, or a tuple of several. Tensors that only go through are handed on as views: a stage's inputs
        have their own gradients.
        """
        held: dict[Value, torch.Tensor] = dict(zip(self.inputs, given, strict=True))

        def filled(each: Any) -> Any:
            match each:
                case Value():
                    return held[each]
                case Attribute(name):
                    owner, _, own = name.rpartition(".")
                    return getattr(module.get_submodule(owner), own)
                case Submodule(name, method):
                    found = module.get_submodule(name)
                    return getattr(found, method) if method else found
            return each

        for call, done in zip(self.calls, self._done_with(), strict=True):
            target = filled(call.target)
            with call.ambience.on(device) if call.ambience else contextlib.nullcontext():
                result = target(*mapped(filled, call.args), **mapped(filled, call.kwargs))
            if call.gives:
                tensors = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
                held.update(zip(call.gives, tensors, strict=True))
            del result
            for each in done:
                del held[each]
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
        """The values that nothing needs any more after each call."""
        found = self.__dict__.get("_done")
        if found is None:
            later: set[Value] = {*self.outputs}
            found = []
            for call in reversed(self.calls):
                here = {*call.uses(Value), *call.gives}
                found.append(tuple(sorted(here - later, key=lambda each: each.number)))
                later |= here
            found.reverse()
            self.__dict__["_done"] = found
        return found
