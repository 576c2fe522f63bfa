"""The gradients of a stage's input, as soon as autograd has computed them: torch's stages give them after backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class InputGradients:
    """Has ``tell`` called once in the backward of ``micro_batch`` of ``stage``, torch's, when they are all there.

    From then on the stage gives them as what it sends. What ``tell`` raises is raised by ``done``: raised in backward,
    it would leave replicas waiting for each other.
    """

    def __init__(self, stage: Any, micro_batch: int, tell: Callable[[], None]) -> None:
        self._stage, self._micro_batch, self._tell = stage, micro_batch, tell
        self._told = False
        self._failure: Exception | None = None
        _, values = stage.fwd_cache[micro_batch]
        self._values = values[: len(stage.args_recv_info[micro_batch])]
        awaited = [
            each
            for each in self._values
            if isinstance(each, torch.Tensor) and each.requires_grad and each.is_leaf
        ]
        self._missing = len(awaited)
        self._handles = [each.register_post_accumulate_grad_hook(self._computed) for each in awaited]

    def _computed(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if self._missing:
            return
        self._told = True
        self._stage.bwd_cache[self._micro_batch] = tuple(
            each.grad if isinstance(each, torch.Tensor) else None for each in self._values
        )
        try:
            self._tell()
        except Exception as failure:  # raised again behind backward
            self._failure = failure

    def done(self) -> None:
        """Backward has returned: tell now if nothing was told, for an input that some of the graph does not need."""
        for handle in self._handles:
            handle.remove()
        if self._failure is not None:
            raise self._failure
        if self._told:
            self._stage.bwd_cache.pop(self._micro_batch, None)  # torch has put there what was sent
        else:
            self._tell()
