"""Live modules whose forward is another one: their class becomes a subclass, so that nothing else of them changes."""

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


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with its tensors changed, in tuples, lists, dicts and data classes within each other.

    What is none of these, caches of attention among it, and what has no tensor that changes, is the same object.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [each_tensor(each, change) for each in value]
        if all(item is other for item, other in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):  # copied, for those of transformers are more than that
        found = {key: each_tensor(each, change) for key, each in value.items()}
        if all(each is value[key] for key, each in found.items()):
            return value
        changed = copy.copy(value)
        for key, each in found.items():
            changed[key] = each
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        held = {name: each_tensor(getattr(value, name), change) for name in names}
        if all(each is getattr(value, name) for name, each in held.items()):
            return value
        like: Any = copy.copy(value)
        for name, each in held.items():
            object.__setattr__(like, name, each)
        return like
    return value


Forward = Callable[..., Any]
"""Called with the forward that the module had, the module, and what it is given."""


class Changed:
    """What the class of a module with another forward is besides its own."""

    may_be_wrapped = False
    """Whether another forward around this one still trains alike."""


def module_at(root: nn.Module, path: str, wanted: str) -> nn.Module:
    """The module at ``path`` in ``root`` that is to do what ``wanted`` says. Raises UnsupportedError: there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        raise UnsupportedError(
            f"the model has no module that is to {wanted}", got=repr(path),
            expected=f"a module of {type(root).__name__}, as named_modules has them",
        ) from None  # fmt: skip


def give_forward(module: nn.Module, path: str, forward: Forward) -> None:
    """Have ``module``, which an error names as ``path``, compute ``forward`` around its own.

    Copies and pickles of it are of the class that it had. Raises as ``give_class`` does.
    """
    give_class(module, path, with_forward(type(module), forward))


def give_call(module: nn.Module, path: str, around: Forward) -> None:
    """Have calls of ``module`` go through ``around``: its hooks too, and a forward that somebody puts there later.

    Lightning does that: the module that is wrapped is called with another forward, which is a step of training.
    Raises as ``give_class`` does.
    """
    original = type(module)

    class OtherCall(original, Changed):  # type: ignore[misc, valid-type]
        may_be_wrapped = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return around(partial(original.__call__, self), self, *args, **kwargs)

        __reduce_ex__ = _reduced_as(original)

    give_class(module, path, _named_like(OtherCall, original))


def refuse_forwards_put_there(module: nn.Module, what: str, fix: str) -> None:
    """Have calls of ``module`` raise UnsupportedError where its forward is not that of its class, as in Lightning."""
    module.register_forward_pre_hook(partial(_look_for_another, what, fix))


def _look_for_another(what: str, fix: str, module: nn.Module, _given: Any) -> None:
    if "forward" in vars(module):
        raise UnsupportedError(
            f"{what} needs calls of the model's own forward", got="another one in its place, as Lightning puts there",
            fix=fix,
        )  # fmt: skip


def give_class(module: nn.Module, path: str, changed: type[nn.Module]) -> None:
    """Have ``module`` be of the class ``changed``, which ``with_forward`` has made of its own.

    Raises UnsupportedError where its forward, or that of a module in it, is not the one of its class, unless it was
    changed so that it ``may_be_wrapped``.
    """
    if any(isinstance(each, Changed) and not each.may_be_wrapped for each in module.modules()):
        raise UnsupportedError(
            "another pass has changed a module already", got=path, fix="Name it once in the plan."
        )
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        raise UnsupportedError(
            "this module's forward is not that of its class, so that it cannot be changed", got=path,
            fix="Leave the module, or the pass, out of the plan.",
        )  # fmt: skip
    module.__class__ = changed


def with_forward(original: type[nn.Module], around: Forward, *, besides: type = Changed) -> type[nn.Module]:
    """A class like ``original`` with another forward, which is one of ``besides``, a kind of ``Changed``, too."""

    class OtherForward(original, besides):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return around(partial(original.forward, self), self, *args, **kwargs)

        __reduce_ex__ = _reduced_as(original)

    return _named_like(OtherForward, original)


def _reduced_as(original: type[nn.Module]) -> Callable[[Any, Any], Any]:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        # Later protocols have pickle compare the class that is made with this one.
        reduced: Any = original.__reduce_ex__(self, min(1, protocol))
        made, arguments, *state = reduced
        return made, tuple(original if argument is type(self) else argument for argument in arguments), *state

    return reduce_ex


def _named_like(changed: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    changed.__name__, changed.__qualname__ = original.__name__, original.__qualname__
    changed.__module__ = original.__module__
    return changed


_applied: WeakKeyDictionary[Any, tuple[Pass, ...]] = WeakKeyDictionary()


def apply_all(passes: Sequence[Pass], module: nn.Module, optimizer: Any) -> nn.Module:
    """``module`` under ``passes``, in their order; ``optimizer`` may be None. Raises as ``Pass.apply``
    does, and PluginFaultError where one of another package fails.

    A module that is wrapped again, as by a second ``fit``, has those already that change it.
    """
    known = applied_to(module)
    for pass_ in passes:
        if not (pass_.changes_module and pass_ in known):
            with asking("pass", pass_):
                changed: object = pass_.apply(module, optimizer)
                if not isinstance(changed, nn.Module):
                    raise TypeError(f"apply() returned {type(changed).__name__}, expected a module")
                module = changed
    if passes:
        _applied[module] = tuple(passes)
    return module


def applied_to(module: nn.Module) -> tuple[Pass, ...]:
    """The passes that were applied to ``module``."""
    return _applied.get(module, ())
