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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import HeadwayWarning, UnsupportedError
from headway.passes.other_forward import each_tensor
from headway.torch_private.optimizers import Step, before_every_step, gate_steps, is_in_gate

LOOKED_WITHIN = 3  # backwards whose graphs are looked at within the model too, which takes longer
FIX = "Use bfloat16, or leave the pass precision out of the plan."


# Whether a backward is one that a scale within a model can be right for: looked at before it begins.
#
# Parameters that are scaled may be used by their model alone, and the model may use nothing else that trains but what
# it is given.


class Scale(Protocol):
    """What scales the gradients of a model."""

    looked_within: int
    """Of how many backwards the graph within the model was looked at."""

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of ``parameter`` are unscaled."""

    def backward_begins(self) -> None:
        """Another one."""


def watch_backward(scales: Callable[[], Sequence[Scale]], entering: type[Any], leaving: type[Any]) -> None:
    """Look before every backward from now on, where there are ``scales()``. Called once.

    ``entering`` and ``leaving`` are the autograd functions of what goes into a scaled model and comes out.
    """

    def looking_first(stock: Any) -> Any:
        @functools.wraps(stock)
        def looking(*args: Any, **kwargs: Any) -> Any:
            present = scales()
            if present and not torch_private.inside_backward():  # as recomputation does
                roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
                roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
                _refuse_wrong_uses(roots, present, *map(torch_private.node_type_of, (entering, leaving)))
            return stock(*args, **kwargs)

        return looking

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, looking_first(getattr(torch.autograd, name)))


def _refuse_wrong_uses(
    roots: Sequence[Any], scales: Sequence[Scale], entering: type[Any], leaving: type[Any]
) -> None:
    begins = [root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None]
    left: list[Any] = []
    for node in _nodes(begins, leaving, left):
        parameter = getattr(node, "variable", None)
        if parameter is not None and any(scale.trains(parameter) for scale in scales):
            raise UnsupportedError(
                "a loss uses parameters that train in float16 besides through what their model puts out",
                got=f"a parameter of shape {tuple(parameter.shape)}",
                expected="a loss of the model's outputs", fix=f"Use the optimizer's weight_decay. {FIX}",
            )  # fmt: skip
    if not left:
        return
    for scale in scales:
        scale.backward_begins()
    if all(scale.looked_within >= LOOKED_WITHIN for scale in scales):
        return
    for scale in scales:
        scale.looked_within += 1
    within = [following for node in left for following, _ in node.next_functions if following is not None]
    for node in _nodes(within, entering, []):
        other = getattr(node, "variable", None)
        if other is not None and not any(scale.trains(other) for scale in scales):
            raise UnsupportedError(
                "a model in float16 trains a tensor that is no parameter of its own, whose gradient would be scaled",
                got=f"a tensor of shape {tuple(other.shape)}",
                expected="parameters of the model, and inputs in tuples, lists, dicts or data classes", fix=FIX,
            )  # fmt: skip


def _nodes(begins: Iterable[Any], until: type[Any], ended: list[Any]) -> Iterator[Any]:
    """The nodes behind ``begins`` as far as those of type ``until``, which are put into ``ended``."""
    waiting = list(begins)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(node, until):
            ended.append(node)
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


FIRST_SCALE = 2.0**16
GROWS, GROWS_AFTER = 2.0, 2000  # steps in a row that were made
SHRINKS = 0.5
MANY_LEFT_OUT = 25  # in a row
MANY_BACKWARDS = 1000  # without a step


class LossScale:
    """The scale of one model, which changes from step to step."""

    def __init__(self, module: nn.Module) -> None:
        watch_steps()
        _watch_backward()
        self._module = weakref.ref(module)
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; tensors cannot be compared
        # Steps since the scale has changed.
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # Whether this rank has seen a gradient that is not finite since a step was asked for.
        self._overflowed: torch.Tensor | None = None
        self.value = FIRST_SCALE
        self.left_out = 0
        """Steps in a row that were left out."""
        self.backwards = 0
        self.looked_within = 0
        self._was_halved = False  # behind the last backward
        _scales[module] = self
        self._watch_parameters()  # a closure's first forward is in a step that has asked

    def entering(self, value: Any) -> Any:
        """What the model is given: its gradients are themselves again behind it."""
        if not torch.is_grad_enabled():
            return value
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
                torch_private.put_gradient_hook_first(parameter, self._unscaled)
                self._watched[id(parameter)] = weakref.ref(parameter)

    def _unscaled(self, gradient: torch.Tensor) -> torch.Tensor:
        unscaled = gradient / self.value
        if self._overflowed is None:
            self._overflowed = torch.zeros((), device=gradient.device)
        with torch.no_grad():
            finite = torch.isfinite(unscaled.sum())  # a sum of finite numbers is finite in float32
            self._overflowed += (~finite).to(self._overflowed.device)
        return unscaled

    def backward_begins(self) -> None:
        """One of the model's: see whether steps are asked for at all, or whether the script has left one out."""
        self._was_halved = False
        if self.backwards and self._was_dropped():
            self._overflowed, self.backwards = None, 0
            self._leave_out()
            self._was_halved = False
        self.backwards += 1
        if self.backwards == MANY_BACKWARDS:
            warnings.warn(
                f"no optimizer has asked in {MANY_BACKWARDS} backwards whether its step is to be left out: in float16 "
                "gradients may overflow, which only optimizer.step() of torch.optim finds out",
                HeadwayWarning, stacklevel=4,
            )  # fmt: skip

    def _was_dropped(self) -> bool:
        """Whether gradients have overflowed and the script threw them away, as one does that looks at their norm."""
        parameters = [each for known in self._watched.values() if (each := known()) is not None]
        # Whoever looks at a gradient that is still to be averaged asks for it, and not all ranks do so here.
        if self._overflowed is None or any(type(each) is not nn.Parameter for each in parameters):
            return False
        left = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return bool(self._overflowed) and not any(bool(each.any()) for each in left)

    def stepped(self, optimizer: Optimizer, *, finite: bool) -> None:
        """Change the scale as the gradients with which ``optimizer`` would step have it.

        Raises UnsupportedError where they were not finite behind backward and are now: what was wrong is hidden.
        """
        hidden = finite and self._overflowed is not None and bool(self._overflowed)
        self._overflowed, self.backwards = None, 0
        if hidden and self._updates_all(optimizer):
            raise UnsupportedError(
                "gradients overflowed in float16, and were made finite before the optimizer's step",
                got="a step with finite gradients behind a backward whose gradients were not",
                expected="gradients that are not clipped by value, nor have their NaN replaced",
                fix=f"Clip by norm. {FIX}",
            )  # fmt: skip
        if not finite:
            self._leave_out()
            return
        self.left_out = 0
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        if self._made[optimizer] == GROWS_AFTER:
            self.value *= GROWS
            self._made.clear()

    def _leave_out(self) -> None:
        self._made.clear()
        if self._was_halved:  # for another optimizer of the same backward
            return
        self._was_halved = True
        self.value *= SHRINKS
        self.left_out += 1
        if self.left_out == MANY_LEFT_OUT:
            warnings.warn(
                f"{MANY_LEFT_OUT} steps in a row were left out, since gradients were not finite, down to a scale "
                f"of {self.value:g}: this model does not train in float16",
                HeadwayWarning, stacklevel=3,
            )  # fmt: skip

    def _updates_all(self, optimizer: Optimizer) -> bool:
        own = set(map(id, _updated(optimizer)))
        return all(number in own for number, known in self._watched.items() if known() is not None)


_scales: weakref.WeakKeyDictionary[nn.Module, LossScale] = weakref.WeakKeyDictionary()


class _Leaving(torch.autograd.Function):
    """The output in float32, in memory of its own: a script may write into it."""

    @staticmethod
    def forward(ctx: Any, scale: LossScale, value: torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.dtype = scale, value.dtype
        return value.float() if value.dtype is torch.float16 else value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return None, (gradient * ctx.scale.value).to(ctx.dtype)


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: LossScale, value: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return None, gradient / ctx.scale.value


def _passed(function: type[Any], scale: LossScale, value: torch.Tensor) -> torch.Tensor:
    if not (value.requires_grad and torch.is_grad_enabled()):
        return value
    passed: torch.Tensor = function.apply(scale, value)
    return passed


@functools.cache
def _watch_backward() -> None:
    watch_backward(lambda: list(_scales.values()), _Entering, _Leaving)


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
            fix=FIX,
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
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or kind is torch.optim.LBFGS:
        raise UnsupportedError(
            "in float16 a step that is given a closure has to call it once, before all else", got=kind.__name__,
            expected="an optimizer of torch.optim but LBFGS", fix=FIX,
        )  # fmt: skip
    with torch.enable_grad():
        return closure(), args[1:], others


def _refuse_unasked(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if is_in_gate(optimizer):
        return
    if any(scale.trains(each) for scale in list(_scales.values()) for each in _updated(optimizer)):
        raise UnsupportedError(
            "this optimizer's step cannot be left out where gradients overflow in float16",
            got="a step that was taken hold of before the plan was applied, as by a scheduler of learning rates",
            fix="Make the scheduler after the plan is applied, use headway run, or use bfloat16.",
        )  # fmt: skip


def _updated(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])
