"""Functions that build torch modules: found by name, called, and checked."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.errors import UserError

FORM = "package.module:function, which returns a torch module and an example of its inputs for one worker's batch"


def function_named(text: str) -> Callable[..., Any]:
    """Import the function that ``text`` names, with this folder in front of the path. Raises UserError."""
    module_name, _, name = text.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            found = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as failure:  # whatever the user's module does
        raise UserError(
            f"{module_name} cannot be imported", got=f"{type(failure).__name__}: {failure}", expected=FORM
        ) from None
    if not callable(found):
        raise UserError(f"{module_name} has no function of this name", got=repr(name), expected=FORM)
    return found  # type: ignore[no-any-return]


class Built:
    """A module, and a call of it that gives a loss."""

    def __init__(
        self,
        text: str,
        make: Callable[..., Any],
        on: AbstractContextManager[Any],
        samples: int | None = None,
    ) -> None:
        """Call ``make`` with tensors made ``on`` a device, for a batch of ``samples`` or its own.

        A function with an argument ``samples`` is called with it; of others the inputs' first dimension is cut or
        repeated. Raises UserError for anything but a module and inputs.
        """
        self._text = text
        self._on = on
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if samples is not None and _takes_samples(make):
            make = partial(make, samples=samples)
        made = self._guarded(make)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise UserError(f"{text} returned something else", got=type(made).__name__, expected=FORM)
        self.module: nn.Module = made[0].train()
        self._inputs = made[1]
        if self.samples < 1:
            raise UserError(
                f"{text}: its inputs hold no sample",
                got=self.batch,
                expected="a batch of at least one sample",
            )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise UserError(
                f"{text}: the module has nothing to train", got="no parameter that requires a gradient"
            )
        if samples is not None and self.samples != samples:
            if isinstance(make, partial):
                raise UserError(
                    f"{text} made another batch than its argument says",
                    got=f"{self.samples} samples", expected=f"{samples}",
                )  # fmt: skip
            self._inputs = self._guarded(lambda: _resized(self._inputs, self.samples, samples))

    def autocast(self, dtype: torch.dtype | None) -> None:
        """From now on compute in mixed precision of ``dtype``, as ``torch.autocast`` does."""
        if dtype is not None:
            kind = next(self.module.parameters()).device.type
            self._autocast = partial(torch.autocast, "cpu" if kind == "meta" else kind, dtype=dtype)

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Each module that owns trainable parameters, with their full names; shared ones have one name everywhere."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        owned = {
            name: tuple(names[id(p)] for p in module.parameters(recurse=False) if p.requires_grad)
            for name, module in self.module.named_modules()
        }
        return {name: own for name, own in owned.items() if own}

    @property
    def samples(self) -> int:
        """The length of the first dimension of the first input."""
        first = next((t for t in _tensors(self._inputs) if t.dim()), None)
        return 1 if first is None else len(first)

    @property
    def batch(self) -> str:
        """The shapes of the inputs, in words."""
        return ", ".join("x".join(map(str, tensor.shape)) or "a number" for tensor in _tensors(self._inputs))

    def forward(self) -> torch.Tensor:
        """One forward; returns a loss: what the module returns as such, or the sum of all that it returns."""
        return self._guarded(self._forward)  # type: ignore[no-any-return]

    def backward(self, begin: Callable[[Any], object], forward_done: Callable[[], object]) -> None:
        """One forward and its backward; ``begin`` is told of the inputs, ``forward_done`` of the loss."""

        def both() -> None:
            begin(self._inputs)
            loss = self._forward()
            forward_done()
            loss.backward()

        self._guarded(both)

    def _forward(self) -> torch.Tensor:
        inputs = self._inputs
        with self._autocast():
            if isinstance(inputs, dict):
                result = self.module(**inputs)
            else:
                result = self.module(*inputs) if isinstance(inputs, (tuple, list)) else self.module(inputs)
        loss = getattr(result, "loss", None)
        if isinstance(loss, torch.Tensor):
            return loss
        outputs = [tensor for tensor in _tensors(result) if tensor.requires_grad]
        if not outputs:
            raise UserError(f"{self._text}: nothing that the module returned has a gradient")
        return torch.stack([output.float().sum() for output in outputs]).sum()

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            with self._on, redirect_stdout(sys.stderr):
                return action()
        except UserError:
            raise
        except (Exception, SystemExit) as failure:  # whatever the user's function and module do
            raise UserError(
                f"{self._text} failed", got=f"{type(failure).__name__}: {failure}", expected=FORM,
                fix="A model that reads tensors' values cannot be costed without data: pass --device here to time it.",
            ) from None  # fmt: skip


def _takes_samples(make: Callable[..., Any]) -> bool:
    try:
        return "samples" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # of what is callable and has no signature
        return False


def _resized(value: Any, length: int, samples: int) -> Any:
    """``value`` with tensors whose first dimension is the batch cut or repeated to so many samples."""
    if isinstance(value, torch.Tensor):
        is_batch = value.dim() > 0 and len(value) == length
        return value[torch.arange(samples, device=value.device) % length] if is_batch else value
    if isinstance(value, dict):
        return {key: _resized(part, length, samples) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_resized(part, length, samples) for part in value]
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]
