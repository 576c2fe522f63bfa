"""Records the calls of a module's forward, so that they can be divided among stages.

The forward runs once with fake tensors, which have shapes and dtypes but compute nothing. A call of a submodule is
recorded as one call; only modules that are to be split are traced into, down to the torch functions that they call.
A stage then makes its share of these calls on the original submodules.

Why not torch's tracers: ``torch.export``, which ``torch.distributed.pipelining.pipeline`` is built on,
flattens every submodule into operations: dropout and batch norm keep the mode in which they were traced, checkpoints
and hooks are lost. ``torch.fx.symbolic_trace`` keeps submodules, but refuses code that looks at a shape, such as
``assert t <= self.block_size``. Here shapes are numbers, so such code runs unchanged; a forward that branches on the
*values* of tensors is refused. Constants derived from shapes are recorded, so a recording holds for these shapes.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.errors import UnsupportedError, one_line
from headway.strategies.pipeline.dividing import Ambience, Attribute, Call, Like, Recording, Submodule, Value
from headway.torch_private import tracing as private
from headway.torch_private.tensors import version_of
from headway.torch_private.tracing import is_fake

_MOST = 100_000  # objects that are looked at


def objects_in(value: Any) -> Iterator[Any]:
    """The objects with attributes in nested containers, except modules, tensors and functions."""
    left, seen = [value], set[int]()
    while left:
        item = left.pop()
        if isinstance(item, dict | list | tuple | set | frozenset):
            if id(item) not in seen:  # a container may contain itself
                seen.add(id(item))
                left += _inside(item)
        elif hasattr(item, "__dict__") and not (
            isinstance(item, torch.Tensor | nn.Module | type) or callable(item)
        ):
            yield item


def keeps_tensors(value: Any) -> bool:
    """Whether a fake tensor is reachable through an object's attributes."""
    left, seen = [value], set[int]()
    while left and len(seen) < _MOST:
        item = left.pop()
        if isinstance(item, torch.Tensor) and is_fake(item):
            return True
        if id(item) in seen or isinstance(item, torch.Tensor | nn.Module | type):
            continue
        seen.add(id(item))
        left += _inside(item)
    return False


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    return [*getattr(value, "__dict__", {}).values()]


_RESTORED = ("_parameters", "_buffers", "_modules")
HOW_TO_MEND = (
    "Move that part into its own module, choose other split_points, or build "
    "stages with torch.distributed.pipelining and start the script with headway run."
)


@dataclass(frozen=True)
class Drawn:
    """The states of Python's and numpy's random number generators."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> Drawn:
        """The current states."""
        arrays = sys.modules.get("numpy")
        if arrays is None:
            return Drawn(random.getstate(), None)
        name, keys, *rest = arrays.random.get_state()
        return Drawn(random.getstate(), (name, tuple(keys), *rest))

    def put_back(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module, inside: set[str]) -> Iterator[None]:
    """Undo what a forward changes in its modules.

    Raises UnsupportedError for hooks and attribute assignments of the modules ``inside``: stages would not repeat them.
    """
    for name in inside:
        if private.has_hooks(model.get_submodule(name)):
            raise UnsupportedError(
                "a module that is split across stages has hooks, which no rank could call", got=name or "the model",
                fix="Register the hooks on its submodules instead.",
            )  # fmt: skip
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    before = [(name, module, _attributes(module)) for name, module in model.named_modules()]
    changed = None
    try:
        yield
    finally:
        for name, module, earlier in before:
            now = _attributes(module)
            if name in inside and changed is None:
                changed = next(
                    (f"{name or 'model'}.{attribute}" for attribute in _differing(earlier, now)), None
                )
            vars(module).update(
                {attribute: value for attribute, value in earlier.items() if attribute not in _RESTORED}
            )
            for attribute in vars(module).keys() - earlier.keys():
                del vars(module)[attribute]
            for attribute in _RESTORED:
                kept = vars(module)[attribute]
                if (
                    kept != earlier[attribute]
                    if attribute == "_modules"
                    else _differing(earlier[attribute], kept)
                ):
                    kept.clear()
                    kept.update(earlier[attribute])
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if changed is not None:
        raise UnsupportedError(
            "the forward of a module that is split across stages assigns attributes, which the stages would not",
            got=changed, fix=HOW_TO_MEND,
        )  # fmt: skip


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: dict(value) if name in _RESTORED else value for name, value in vars(module).items()}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = []
    for name in before.keys() | after.keys():
        was, now = before.get(name), after.get(name)
        if name in _RESTORED:
            names += _differing(was or {}, now or {})
        elif was is not now or (name in before) != (name in after):
            names.append(name)
    return sorted(names)


_ROOT, _TORCH = Path(__file__).parents[2], Path(torch.__file__).parent


class SplitInsideError(Exception):
    """``pipe_split`` was called inside a module that is not traced into."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inside: set[str],
    device: torch.device,
    *,
    split_inside: bool = False,
) -> Recording:
    """Record ``model(*args, **kwargs)`` on fake tensors, tracing into the modules named in ``inside``.

    Nothing is computed and the model does not change. Raises UnsupportedError for a forward that recorded calls cannot
    reproduce; SplitInsideError for a ``pipe_split`` in another module, if ``split_inside``.
    """
    with left_as_it_was(model, inside), private.without_computing(), private.Draws() as draws:
        with torch.device(device):
            args, kwargs = private.mapped(_fake, (args, dict(kwargs)))
        recorder = _Recorder(model, inside, device, draws, split_inside=split_inside)
        recorder.begin(args, kwargs)
        drawn = Drawn.now()
        looked_into = tuple(recorder.looked_into())
        with private.calls_intercepted(recorder.module_called, recorder.function_called, looked_into):
            try:
                with recorder:
                    output = model(*args, **kwargs)
            except (UnsupportedError, SplitInsideError):
                raise
            except Exception as failure:
                raise _refused(model, failure) from failure
        if drawn != Drawn.now():
            drawn.put_back()
            raise UnsupportedError(
                "forward draws random numbers with Python or numpy; a pipeline would repeat them in every step",
                got=type(model).__name__, fix="Draw them with torch, or move that part into its own module.",
            )  # fmt: skip
        return recorder.end(output)


def _fake(value: Any) -> Any:
    """An empty tensor like that of the batch."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)


class _Recorder(TorchFunctionMode):
    def __init__(
        self,
        model: nn.Module,
        inside: set[str],
        device: torch.device,
        draws: private.Draws,
        *,
        split_inside: bool,
    ) -> None:
        super().__init__()
        self._model, self._device, self._draws = model, device, draws
        self._split_inside = split_inside
        self._modules: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(module), []).append(name)
        self._inside = {id(model.get_submodule(name)) for name in inside}
        tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(remove_duplicate=False)]
        tensors += model.named_buffers(remove_duplicate=False)
        self._attributes: dict[int, str] = {}
        for name, tensor in tensors:
            self._attributes.setdefault(id(tensor), name)
        self._values: dict[int, Value] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets the id of one
        self._calling: list[str] = []  # modules
        self._objects: dict[int, Any] = {}  # that are passed on
        self._suspended = False
        self._ambience, self._in_checkpoint = Ambience.now(device), private.in_checkpoint()
        self._recording = Recording(())

    def looked_into(self) -> Iterator[nn.Module]:
        """The modules that are traced into."""
        return (module for module in self._model.modules() if id(module) in self._inside)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Note the inputs."""
        tensors = [leaf for leaf in private.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._recording.inputs = tuple(self._new(tensor) for tensor in tensors)

    def end(self, output: Any) -> Recording:
        """Finish the recording with the model's ``output``. Raises UnsupportedError if stages cannot return it."""
        keeper = next((object_ for object_ in self._objects.values() if keeps_tensors(object_)), None)
        if keeper is not None:
            raise self._refused(
                "passes on an object that holds tensors (for Transformers, set use_cache=False in the config)",
                type(keeper).__name__,
            )
        self._recording.output = private.mapped(self._stand_in, output)
        if any(isinstance(leaf, Attribute | torch.Tensor) for leaf in private.leaves(self._recording.output)):
            raise self._refused("returns a tensor that it did not compute", "a parameter, buffer or constant")
        return self._recording

    # What is called --------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call of a torch function."""
        del types
        kwargs = kwargs or {}
        if private.is_pipe_split(func):
            if not self._suspended:
                self._recording.marks.append(len(self._recording.calls))
            elif self._split_inside:
                raise SplitInsideError(set(self._calling))
            return func(*args, **kwargs)
        return self.function_called(func, func, args, kwargs)

    def function_called(self, target: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Record a call of ``target``; ``function`` carries it out."""
        if self._suspended:
            return function(*args, **kwargs)
        return self._record(target, function, args, kwargs)

    def module_called(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Record a call of a module, or trace into it; ``call`` carries it out."""
        names = self._modules.get(id(module))
        if names is None or (self._suspended and not self._split_inside):
            return call(*args, **kwargs)
        self._calling.append(names[0])
        try:
            if self._suspended:
                return call(*args, **kwargs)
            self._begins(names)
            if id(module) in self._inside:
                return call(*args, **kwargs)
            return self._record(Submodule(names[0]), call, args, kwargs)
        finally:
            self._calling.pop()

    def _begins(self, names: list[str]) -> None:
        for name in names:
            self._recording.begins.setdefault(name, len(self._recording.calls))

    def _record(self, target: Any, carry_out: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = getattr(target, "__name__", "")
        if name == "register_hook":
            raise self._refused("registers a hook on a tensor", name)
        stand_ins = private.mapped(self._stand_in, args), private.mapped(self._stand_in, kwargs)
        self._objects.update((id(object_), object_) for object_ in objects_in((args, kwargs)))
        draws, drawn = self._draws.count, Drawn.now()
        inputs = [leaf for leaf in private.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [version_of(tensor) for tensor in inputs]
        self._suspended = True
        try:
            result = carry_out(*args, **kwargs)
        finally:
            self._suspended = False
            drawn.put_back()  # a module draws its own
        tensors = [leaf for leaf in private.leaves(result) if isinstance(leaf, torch.Tensor)]
        written = [tensor for tensor, was in zip(inputs, versions, strict=True) if version_of(tensor) != was]
        if not tensors and (result is not None or not inputs):
            return result  # a shape, a type, a mode
        ambience = Ambience.now(self._device)
        in_place = (name.endswith("_") and not name.endswith("__") and name != "requires_grad_") or (
            name in ("__setitem__", "__set__") or "out" in kwargs
        )
        changes = self._with_memory_of(written)
        call = Call(
            target, *stand_ins, tuple(self._new(tensor) for tensor in tensors),
            None if ambience == self._ambience else ambience, changes,
            in_place or bool(changes), self._draws.count > draws,
        )  # fmt: skip
        if in_place and isinstance(call.first, Attribute):
            raise self._refused("changes a parameter or a buffer between modules", call.first.name)
        if private.in_checkpoint() and not self._in_checkpoint:
            raise self._refused(
                "checkpoints something other than a module, or offloads activations", name or str(target)
            )
        for use in call.uses(Submodule):  # one that is checkpointed, too
            self._begins(self._modules[id(self._model.get_submodule(use.name))])
        self._recording.calls.append(call)
        if in_place and isinstance(call.first, Value):
            self._recording.likes[call.first] = Like.of(self._kept[call.first.number])
        return result

    # Tensors ---------------------------------------------------------------------------------------------

    def _new(self, tensor: torch.Tensor) -> Value:
        value = Value(len(self._kept))
        self._kept.append(tensor)
        if id(tensor) not in self._attributes:  # ``parameter.to(dtype)`` may be the parameter
            self._values[id(tensor)] = value
        self._recording.likes[value] = Like.of(tensor)
        return value

    def _with_memory_of(self, tensors: list[torch.Tensor]) -> tuple[Value, ...]:
        """The tensors so far that share memory with ``tensors``."""
        memories = {private.memory_of(tensor) for tensor in tensors}
        if not memories:
            return ()
        return tuple(
            Value(number) for number, kept in enumerate(self._kept) if private.memory_of(kept) in memories
        )

    def _stand_in(self, argument: Any) -> Any:
        if isinstance(argument, nn.Module):
            return self._submodule(argument)
        if isinstance(argument, MethodType) and isinstance(argument.__self__, nn.Module):
            return Submodule(self._submodule(argument.__self__).name, argument.__name__)
        if not isinstance(argument, torch.Tensor):
            if _has_arguments(argument):
                raise self._refused(
                    "passes on a closure or a function with default arguments",
                    getattr(argument, "__qualname__", "?"),
                )
            return argument
        if value := self._values.get(id(argument)):
            return value
        if name := self._attributes.get(id(argument)):
            return Attribute(name)
        if private.is_fake(argument):
            raise self._refused(
                "uses a tensor that does not come from a torch function", f"shape {list(argument.shape)}"
            )
        if argument.requires_grad:
            raise self._refused(
                "uses a tensor that requires gradients but is not a parameter",
                f"shape {list(argument.shape)}",
            )
        return argument

    def _submodule(self, module: nn.Module) -> Submodule:
        names = self._modules.get(id(module))
        if names is None or id(module) in self._inside:
            raise self._refused("passes on a module that is itself split", type(module).__name__)
        return Submodule(names[0])

    def _refused(self, what: str, got: str) -> UnsupportedError:
        where = f" in {self._calling[-1]}" if self._calling and self._calling[-1] else ""
        return UnsupportedError(
            f"forward of {type(self._model).__name__} cannot be split into stages: it {what}",
            got=f"{got}{where}",
            fix=HOW_TO_MEND,
        )


def _has_arguments(function: Any) -> bool:
    """Whether a function may refer to modules or tensors other than its arguments."""
    return isinstance(function, partial) or (
        isinstance(function, FunctionType)
        and not function.__module__.startswith("torch.")
        and bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)
    )


def _refused(model: nn.Module, failure: Exception) -> UnsupportedError:
    frames = [
        frame for frame in traceback.extract_tb(failure.__traceback__)
        if _ROOT not in Path(frame.filename).parents and _TORCH not in Path(frame.filename).parents
    ]  # fmt: skip
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    by_value = isinstance(failure, private.BY_VALUE)
    reason = "it branches on the value of a tensor" if by_value else "it failed on tensors without values"
    return UnsupportedError(
        f"forward of {type(model).__name__} cannot be traced: {reason}",
        got=f"{type(failure).__name__}: {one_line(str(failure), 200)}{where}", fix=HOW_TO_MEND,
    )  # fmt: skip
