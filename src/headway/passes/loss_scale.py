"""Dynamic loss scaling of a live float16 model, so that small gradients do not underflow.

The scale of Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with the rule and constants of
``torch.amp.GradScaler``. Gradients are scaled where they enter the model and unscaled where they leave it, at
parameters and inputs, in float32, so clipping and logging see true gradients. If one is not finite, the optimizer step
is skipped and the scale is halved.

Before a backward begins, its graph is checked: only the model itself may use the scaled parameters, and the model may
train nothing but its parameters and inputs.
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
from headway.passes.other_forward import map_tensors
from headway.torch_private.optimizers import Step, before_every_step, gate_steps, is_in_gate

CHECKED_BACKWARDS = 3  # backwards whose graphs are also checked inside the model, which is slow
FIX = "Use bfloat16, or leave the pass precision out of the plan."


class Scale(Protocol):
    """The scale of a model's gradients, as the check of graphs sees it."""

    checked_backwards: int
    """The number of backwards whose graph inside the model was checked."""

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` belongs to the model, so that its gradients are unscaled."""

    def backward_begins(self) -> None:
        """Count a backward through the model."""


def watch_backward(scales: Callable[[], Sequence[Scale]], entering: type[Any], leaving: type[Any]) -> None:
    """Check the graph before every backward from now on, while there are ``scales()``. Called once.

    ``entering`` and ``leaving`` are the autograd functions at a scaled model's inputs and outputs.
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
                "the loss uses float16 parameters directly, not only through the model's output",
                got=f"a parameter of shape {tuple(parameter.shape)}",
                expected="a loss of the model's outputs", fix=f"Use the optimizer's weight_decay. {FIX}",
            )  # fmt: skip
    if not left:
        return
    for scale in scales:
        scale.backward_begins()
    if all(scale.checked_backwards >= CHECKED_BACKWARDS for scale in scales):
        return
    for scale in scales:
        scale.checked_backwards += 1
    within = [following for node in left for following, _ in node.next_functions if following is not None]
    for node in _nodes(within, entering, []):
        tensor = getattr(node, "variable", None)
        if tensor is not None and not any(scale.trains(tensor) for scale in scales):
            raise UnsupportedError(
                "the float16 model trains a tensor that is not one of its parameters; its gradient would be scaled",
                got=f"a tensor of shape {tuple(tensor.shape)}",
                expected="parameters of the model, and inputs in tuples, lists, dicts or data classes", fix=FIX,
            )  # fmt: skip


def _nodes(begins: Iterable[Any], until: type[Any], ended: list[Any]) -> Iterator[Any]:
    """Yield the graph nodes reachable from ``begins``, up to nodes of type ``until``, which go to ``ended``."""
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
GROWS, GROWS_AFTER = 2.0, 2000  # consecutive steps
SHRINKS = 0.5
MANY_LEFT_OUT = 25  # consecutive skipped steps
MANY_BACKWARDS = 1000  # without a step


class LossScale:
    """The dynamic loss scale of one model."""

    def __init__(self, module: nn.Module) -> None:
        watch_steps()
        _watch_backward()
        self._module = weakref.ref(module)
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}  # by id; tensors cannot be compared
        # Steps since the last change of the scale.
        self._made: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # Whether this rank has seen a gradient that is not finite since the last step.
        self._overflowed: torch.Tensor | None = None
        self.value = FIRST_SCALE
        self.left_out = 0
        """Consecutive skipped steps."""
        self.backwards = 0
        self.checked_backwards = 0
        self._was_halved = False  # since the last backward
        _scales[module] = self
        self._watch_parameters()  # needed before a closure's first forward

    def entering(self, value: Any) -> Any:
        """The model's inputs, with their gradients unscaled."""
        if not torch.is_grad_enabled():
            return value
        self._watch_parameters()
        return map_tensors(value, functools.partial(_passed, _Entering, self))

    def leaving(self, value: Any) -> Any:
        """The model's outputs, with their gradients scaled."""
        return map_tensors(value, functools.partial(_passed, _Leaving, self))

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of ``parameter`` are unscaled."""
        reference = self._watched.get(id(parameter))
        return reference is not None and reference() is parameter

    def _watch_parameters(self) -> None:
        module = self._module()
        assert module is not None, "the model is alive while it is called"
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
        """Count a backward; notice if the script dropped the gradients of the last one, or never steps."""
        self._was_halved = False
        if self.backwards and self._was_dropped():
            self._overflowed, self.backwards = None, 0
            self._leave_out()
            self._was_halved = False
        self.backwards += 1
        if self.backwards == MANY_BACKWARDS:
            warnings.warn(
                f"no optimizer has stepped in {MANY_BACKWARDS} backwards: float16 gradients may overflow, and only "
                "step() of a torch.optim optimizer can skip such steps",
                HeadwayWarning, stacklevel=4,
            )  # fmt: skip

    def _was_dropped(self) -> bool:
        """Whether gradients overflowed and the script discarded them, for example after checking their norm."""
        parameters = [watched for reference in self._watched.values() if (watched := reference()) is not None]
        # Reading a gradient that is still to be averaged would start communication, which not all ranks join here.
        if self._overflowed is None or any(type(parameter) is not nn.Parameter for parameter in parameters):
            return False
        left = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return bool(self._overflowed) and not any(bool(gradient.any()) for gradient in left)

    def stepped(self, optimizer: Optimizer, *, finite: bool) -> None:
        """Update the scale before a step of ``optimizer``; ``finite`` says whether its gradients are finite.

        Raises UnsupportedError if gradients overflowed in backward but are finite now, which hides the overflow.
        """
        hidden = finite and self._overflowed is not None and bool(self._overflowed)
        self._overflowed, self.backwards = None, 0
        if hidden and self._updates_all(optimizer):
            raise UnsupportedError(
                "gradients overflowed in float16, and were made finite before the optimizer's step",
                got="a step with finite gradients after a backward with overflow",
                expected="gradients without clipping by value or replaced NaN",
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
        if self._was_halved:  # by another optimizer, for the same backward
            return
        self._was_halved = True
        self.value *= SHRINKS
        self.left_out += 1
        if self.left_out == MANY_LEFT_OUT:
            warnings.warn(
                f"{MANY_LEFT_OUT} consecutive steps were skipped because gradients were not finite, down to a scale "
                f"of {self.value:g}: this model does not train in float16",
                HeadwayWarning, stacklevel=3,
            )  # fmt: skip

    def _updates_all(self, optimizer: Optimizer) -> bool:
        updated = set(map(id, _updated(optimizer)))
        return all(
            number in updated for number, reference in self._watched.items() if reference() is not None
        )


_scales: weakref.WeakKeyDictionary[nn.Module, LossScale] = weakref.WeakKeyDictionary()


class _Leaving(torch.autograd.Function):
    """Copies the output to float32 memory, which the script may overwrite."""

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


@functools.cache
def watch_steps() -> None:
    """Check every optimizer step from now on, except bound methods that someone already holds."""
    gate_steps(_step)
    before_every_step(_refuse_unasked)


def _step(optimizer: Optimizer, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scales = [scale for scale in list(_scales.values()) if any(map(scale.trains, _updated(optimizer)))]
    if not scales:
        return step(*args, **kwargs)
    if torch_private.inside_backward():
        raise UnsupportedError(
            "float16 needs the complete gradients before a step", got="an optimizer step inside backward",
            fix=FIX,
        )  # fmt: skip
    loss, args, kwargs = _closed(optimizer, args, kwargs)
    finite = torch_private.gradients_are_finite(optimizer)
    for scale in scales:
        scale.stepped(optimizer, finite=finite)
    result = step(*args, **kwargs) if finite else None
    return result if loss is None else loss


def _closed(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Run the step's closure, which computes gradients; returns its result, and the arguments without it."""
    remaining = dict(kwargs)
    closure = args[0] if args else remaining.pop("closure", None)
    if closure is None:
        return None, args, kwargs
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or kind is torch.optim.LBFGS:
        raise UnsupportedError(
            "float16 needs optimizers that call a closure once, first thing in step()", got=kind.__name__,
            expected="an optimizer of torch.optim other than LBFGS", fix=FIX,
        )  # fmt: skip
    with torch.enable_grad():
        return closure(), args[1:], remaining


def _refuse_unasked(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if is_in_gate(optimizer):
        return
    if any(scale.trains(parameter) for scale in list(_scales.values()) for parameter in _updated(optimizer)):
        raise UnsupportedError(
            "this optimizer's step cannot be skipped when float16 gradients overflow",
            got="a step() method bound before the plan was applied, as by a learning-rate scheduler",
            fix="Create the scheduler after the plan is applied, use headway run, or use bfloat16.",
        )  # fmt: skip


def _updated(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
