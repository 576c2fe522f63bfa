"""How long each module of a stage's chain takes: timed in warm-up steps of a pipeline, whose modules have no spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

from torch import nn

from headway.model import Chain
from headway.recording.layer import guarded
from headway.recording.modules import JobHook, tensors_of

T = TypeVar("T")


class LinkTimes:
    """Times the modules of one stage's chain while attached, a micro-batch at a time.

    A forward is divided at the moments at which modules are called, a backward at those at which the gradients of what
    they have put out are there. What lies before and behind the chain counts to its ends.
    """

    def __init__(self, stage: nn.Module, chain: Chain) -> None:
        self._chain = chain
        self._entered_ns: list[int] = []
        self._came_back: list[tuple[int, int]] = []  # when, and to which module
        self._forwards: list[list[int]] = []
        self._backwards: list[list[int]] = []
        self._handles = []
        for place, link in enumerate(chain.links):
            module = stage.get_submodule(link.name)
            self._handles.append(module.register_forward_pre_hook(JobHook(self._enter)))
            self._handles.append(module.register_forward_hook(_Mark(self._came_back, place)))

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward(self, carry_out: Callable[[], T]) -> T:
        """Time a forward."""
        self._entered_ns.clear()
        begin_ns = time.monotonic_ns()
        result = carry_out()
        end_ns = time.monotonic_ns()
        if len(self._entered_ns) == len(self._chain.links):
            self._forwards.append(_between([begin_ns, *self._entered_ns[1:], end_ns]))
        return result

    def backward(self, carry_out: Callable[[], T]) -> T:
        """Time a whole backward."""
        self._came_back.clear()
        begin_ns = time.monotonic_ns()
        result = carry_out()
        end_ns = time.monotonic_ns()
        if [place for _, place in self._came_back] == list(range(len(self._chain.links)))[::-1]:
            moments = [at_ns for at_ns, _ in self._came_back]
            self._backwards.append(_between([begin_ns, *moments[1:], end_ns])[::-1])
        return result

    def timed(self) -> Chain:
        """The chain with the median of what was timed; as it was where nothing was."""
        if not self._forwards or not self._backwards:
            return self._chain
        links = [
            link.model_copy(
                update={
                    "forward_ns": _median(self._forwards, place),
                    "backward_ns": _median(self._backwards, place),
                }
            )
            for place, link in enumerate(self._chain.links)
        ]
        return self._chain.model_copy(update={"links": tuple(links)})

    def _enter(self, _module: nn.Module, _inputs: Any) -> None:
        self._entered_ns.append(time.monotonic_ns())


class _Mark(JobHook):
    """Has noted when the gradient of what a module puts out is there."""

    def __init__(self, noted: list[tuple[int, int]], place: int) -> None:
        super().__init__(self._mark)
        self._noted, self._place = noted, place

    def _mark(self, *arguments: Any) -> None:
        """Mark the node of the output."""
        for tensor in tensors_of(arguments[-1]):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(guarded(self._there))

    def _there(self, _gradients: Any) -> None:
        self._noted.append((time.monotonic_ns(), self._place))


def _between(moments: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(moments)]


def _median(rows: Sequence[Sequence[int]], place: int) -> int:
    return round(median(row[place] for row in rows))
