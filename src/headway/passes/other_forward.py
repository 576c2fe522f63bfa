"""Replaces the forward of live modules by giving them a subclass of their class, so that nothing else changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from headway.errors import UnsupportedError
from headway.passes.base import Pass
from headway.plugins import asking


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``change`` applied to its tensors, inside nested tuples, lists, dicts and data classes.

    Other objects, such as attention caches, and containers without changed tensors are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(element, change) for element in value]
        if all(item is original for item, original in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):  # copied, because those of transformers are subclasses with attributes
        elements = {key: map_tensors(element, change) for key, element in value.items()}
        if all(element is value[key] for key, element in elements.items()):
            return value
        changed = copy.copy(value)
        for key, element in elements.items():
            changed[key] = element
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        held = {name: map_tensors(getattr(value, name), change) for name in names}
        if all(element is getattr(value, name) for name, element in held.items()):
            return value
        like: Any = copy.copy(value)
        for name, element in held.items():
            object.__setattr__(like, name, element)
        return like
    return value


Forward = Callable[..., Any]
"""Called with the module's original forward, the module, and the inputs."""


class ReplacedForward:
    """Mix-in class of modules with a replaced forward."""

    may_be_wrapped = False
    """Whether another forward may wrap this one."""


def module_at(root: nn.Module, path: str, wanted: str) -> nn.Module:
    """The module at ``path`` in ``root``, which is to do what ``wanted`` says. Raises UnsupportedError if missing."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        raise UnsupportedError(
            f"the model has no such module to {wanted}", got=repr(path),
            expected=f"a module name from named_modules() of {type(root).__name__}",
        ) from None  # fmt: skip


def give_forward(module: nn.Module, path: str, forward: Forward) -> None:
    """Wrap the forward of ``module`` in ``forward``; errors name the module as ``path``.

    Its copies and pickles have the original class. Raises as ``give_class`` does.
    """
    give_class(module, path, with_forward(type(module), forward))


def give_call(module: nn.Module, path: str, around: Forward) -> None:
    """Wrap calls of ``module`` in ``around``, including hooks and a forward that is set on the instance later.

    Lightning sets one: it calls the wrapped module with its training step as forward. Raises as ``give_class`` does.
    """
    original = type(module)

    class OtherCall(original, ReplacedForward):  # type: ignore[misc, valid-type]
        may_be_wrapped = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return around(partial(original.__call__, self), self, *args, **kwargs)

        __reduce_ex__ = _reduced_as(original)

    give_class(module, path, _named_like(OtherCall, original))


def refuse_replaced_forward(module: nn.Module, what: str, fix: str) -> None:
    """Make calls of ``module`` raise UnsupportedError if its forward was replaced on the instance, as in Lightning."""
    module.register_forward_pre_hook(partial(_refuse_if_replaced, what, fix))


def _refuse_if_replaced(what: str, fix: str, module: nn.Module, _inputs: Any) -> None:
    if "forward" in vars(module):
        raise UnsupportedError(
            f"{what} needs the model's own forward", got="a forward replaced on the instance, as by Lightning",
            fix=fix,
        )  # fmt: skip


def give_class(module: nn.Module, path: str, changed: type[nn.Module]) -> None:
    """Set the class of ``module`` to ``changed``, made by ``with_forward`` from its class.

    Raises UnsupportedError if the forward of the module was replaced, or if a pass already changed it or a submodule
    in a way that must not be wrapped (``may_be_wrapped``).
    """
    if any(
        isinstance(submodule, ReplacedForward) and not submodule.may_be_wrapped
        for submodule in module.modules()
    ):
        raise UnsupportedError(
            "another pass already changed the module", got=path, fix="Name each module once in the plan."
        )
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        raise UnsupportedError(
            "the module's forward was replaced or scripted, so passes cannot change it", got=path,
            fix="Leave the module, or the pass, out of the plan.",
        )  # fmt: skip
    module.__class__ = changed


def with_forward(
    original: type[nn.Module], around: Forward, *, mixin: type = ReplacedForward
) -> type[nn.Module]:
    """A subclass of ``original`` and ``mixin`` (a ``ReplacedForward``) with its forward wrapped in ``around``."""

    class OtherForward(original, mixin):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return around(partial(original.forward, self), self, *args, **kwargs)

        __reduce_ex__ = _reduced_as(original)

    return _named_like(OtherForward, original)


def _reduced_as(original: type[nn.Module]) -> Callable[[Any, Any], Any]:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        # With later protocols pickle would compare the constructed class with this one.
        reduced: Any = original.__reduce_ex__(self, min(1, protocol))
        constructor, arguments, *state = reduced
        return (
            constructor,
            tuple(original if argument is type(self) else argument for argument in arguments),
            *state,
        )

    return reduce_ex


def _named_like(changed: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    changed.__name__, changed.__qualname__ = original.__name__, original.__qualname__
    changed.__module__ = original.__module__
    return changed


_applied: WeakKeyDictionary[Any, tuple[Pass, ...]] = WeakKeyDictionary()


def apply_all(passes: Sequence[Pass], module: nn.Module, optimizer: Any) -> nn.Module:
    """Apply ``passes`` to ``module``, in order; returns the module. ``optimizer`` may be None.

    Passes that already changed the module are skipped if it is wrapped again, as by a second ``fit``. Raises as
    ``Pass.apply`` does, and PluginFaultError if a plug-in's pass fails.
    """
    already_applied = applied_to(module)
    for pass_ in passes:
        if not (pass_.changes_module and pass_ in already_applied):
            with asking("pass", pass_):
                changed: object = pass_.apply(module, optimizer)
                if not isinstance(changed, nn.Module):
                    raise TypeError(f"apply() returned {type(changed).__name__}, expected a module")
                module = changed
    if passes:
        _applied[module] = tuple(passes)
    return module


def applied_to(module: nn.Module) -> tuple[Pass, ...]:
    """The passes applied to ``module``."""
    return _applied.get(module, ())
