"""Gradients of a model in float16, live: multiplied by a scale within it, so that small ones do not vanish.

The dynamic scale of Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with the rule and the numbers
of ``torch.amp.GradScaler``. Gradients are scaled where they enter the model and are themselves again where they leave
it, at parameters and at inputs, in float32: whoever looks at them, to clip or to log, sees gradients. A step is left
out where one of them is not finite, and the scale is halved.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from headway import torch_private
from headway.errors import HeadwayWarning, UnsupportedError
from headway.passes.each_tensor import each_tensor
from headway.torch_private.step_gates import Step, gate_steps, is_asked
from headway.torch_private.step_hooks import before_every_step

FIRST_SCALE = 2.0**16
GROWS, GROWS_AFTER = 2.0, 2000  # steps in a row that were made
SHRINKS = 0.5
MANY_LEFT_OUT = 25  # in a row
USE_BFLOAT16 = "Use bfloat16, or leave the pass precision out of the plan."


class LossScale:
    """The scale of one model, which changes from step to step."""

    def __init__(self, module: nn.Module) -> None:
        watch_steps()
        _watch_backward()
        self._module = weakref.ref(module)
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; tensors cannot be compared
        self._leader: weakref.ref[Optimizer] | None = None  # the optimizer whose steps count
        self._made = 0  # steps since the scale has changed
        self.value = FIRST_SCALE
        self.left_out = 0
        """Steps in a row that were left out."""
        _scales[module] = self
        self._watch_parameters()  # a closure's first forward is in a step that has asked

    def entering(self, value: Any) -> Any:
        """What the model is given: its gradients are themselves again behind it."""
        self._watch_parameters()
        return each_tensor(value, functools.partial(_passed, _Entering, self))

    def leaving(self, value: Any) -> Any:
        """What the model puts out: gradients are scaled as they enter."""
        return each_tensor(value, functools.partial(_passed, _Leaving, self))

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of ``parameter`` are unscaled."""
        known = self._watched.get(id(parameter))
        return known is not None and known() is parameter

    def _watch_parameters(self) -> None:
        module = self._module()
        assert module is not None, "a model that is called"
        for parameter in module.parameters():
            if parameter.requires_grad and not self.trains(parameter):
                parameter.register_hook(self._unscaled)
                self._watched[id(parameter)] = weakref.ref(parameter)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.value

    def stepped(self, optimizer: Optimizer, *, finite: bool) -> None:
        """Change the scale as the gradients with which ``optimizer`` would step have it."""
        if self._leader is None or self._leader() is None:
            self._leader = weakref.ref(optimizer)
        if not finite:
            self.value *= SHRINKS
            self._made = 0
            self.left_out += 1
            if self.left_out == MANY_LEFT_OUT:
                warnings.warn(
                    f"{MANY_LEFT_OUT} steps in a row were left out, since gradients were not finite, down to a scale "
                    f"of {self.value:g}: this model does not train in float16",
                    HeadwayWarning, stacklevel=2,
                )  # fmt: skip
            return
        self.left_out = 0
        self._made += self._leader() is optimizer
        if self._made == GROWS_AFTER:
            self.value *= GROWS
            self._made = 0


_scales: weakref.WeakKeyDictionary[nn.Module, LossScale] = weakref.WeakKeyDictionary()


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: LossScale, value: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return None, gradient * ctx.scale.value


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: LossScale, value: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return None, gradient / ctx.scale.value


def _passed(function: type[Any], scale: LossScale, value: torch.Tensor) -> torch.Tensor:
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    passed: torch.Tensor = function.apply(scale, value)
    return passed


# Steps


@functools.cache
def watch_steps() -> None:
    """Have every step of any optimizer ask here from now on, but those that somebody holds already."""
    gate_steps(_step)
    before_every_step(_refuse_unasked)


def _step(optimizer: Optimizer, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scales = [scale for scale in list(_scales.values()) if any(map(scale.trains, _updated(optimizer)))]
    if not scales:
        return step(*args, **kwargs)
    if torch_private.inside_backward():
        raise UnsupportedError(
            "float16 needs the gradients of a whole backward before a step", got="an optimizer's step in backward",
            fix=USE_BFLOAT16,
        )  # fmt: skip
    loss, args, kwargs = _closed(optimizer, args, kwargs)
    finite = torch_private.gradients_are_finite(optimizer)
    for scale in scales:
        scale.stepped(optimizer, finite=finite)
    made = step(*args, **kwargs) if finite else None
    return made if loss is None else loss


def _closed(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the closure of a step returns, which computes the gradients, and the arguments without it."""
    others = dict(kwargs)
    closure = args[0] if args else others.pop("closure", None)
    if closure is None:
        return None, args, kwargs
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "float16 needs an optimizer that computes gradients once a step", got=type(optimizer).__name__,
            fix=USE_BFLOAT16,
        )  # fmt: skip
    with torch.enable_grad():
        return closure(), args[1:], others


def _refuse_unasked(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if is_asked(optimizer):
        return
    if any(scale.trains(each) for scale in list(_scales.values()) for each in _updated(optimizer)):
        raise UnsupportedError(
            "this optimizer's step cannot be left out where gradients overflow in float16",
            got="a step that was taken hold of before the plan was applied, as by a scheduler of learning rates",
            fix="Make the scheduler after the plan is applied, use headway run, or use bfloat16.",
        )  # fmt: skip


def _updated(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


# Losses


@functools.cache
def _watch_backward() -> None:
    """Look at every loss before its backward: parameters may be used by the model alone."""
    for name in ("backward", "grad"):
        setattr(torch.autograd, name, _looking_first(getattr(torch.autograd, name)))


def _looking_first(stock: Any) -> Any:
    @functools.wraps(stock)
    def looking(*args: Any, **kwargs: Any) -> Any:
        if _scales:
            roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
            _refuse_other_uses([roots] if isinstance(roots, torch.Tensor) else roots)
        return stock(*args, **kwargs)

    return looking


def _refuse_other_uses(roots: Sequence[Any]) -> None:
    waiting = [each.grad_fn for each in roots if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        parameter = getattr(node, "variable", None)
        if parameter is not None and any(scale.trains(parameter) for scale in list(_scales.values())):
            raise UnsupportedError(
                "a loss uses parameters that train in float16 besides through what their model puts out",
                got=f"a parameter of shape {tuple(parameter.shape)}",
                expected="a loss of the model's outputs", fix=f"Use the optimizer's weight_decay. {USE_BFLOAT16}",
            )  # fmt: skip
        if isinstance(node, _Leaving._backward_cls):
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
