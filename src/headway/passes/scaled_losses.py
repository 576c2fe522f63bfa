"""Whether a backward is one that a scale within a model can be right for: looked at before it begins.

Parameters that are scaled may be used by their model alone, and the model may use nothing else that trains but what
it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from headway import torch_private
from headway.errors import UnsupportedError

LOOKED_WITHIN = 3  # backwards whose graphs are looked at within the model too, which takes longer
FIX = "Use bfloat16, or leave the pass precision out of the plan."


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
    begins = [each.grad_fn for each in roots if isinstance(each, torch.Tensor) and each.grad_fn is not None]
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
