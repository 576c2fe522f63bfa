"""Imports functions that build torch modules, calls them, and checks the result."""

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

FORM = "package.module:function that returns a torch module and example inputs for one worker's batch"


def function_named(text: str) -> Callable[..., Any]:
    """Import the function that ``text`` names, with the current folder on the path. Raises UserError."""
    module_name, _, name = text.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            function = getattr(importlib.import_module(module_name), name, None)
    except (Exception, SystemExit) as failure:  # whatever the user's module does
        raise UserError(
            f"{module_name} cannot be imported", got=f"{type(failure).__name__}: {failure}", expected=FORM
        ) from None
    if not callable(function):
        raise UserError(f"{module_name} has no such function", got=repr(name), expected=FORM)
    return function  # type: ignore[no-any-return]


class Built:
    """A module with example inputs, and a forward that returns a loss."""

    def __init__(
        self,
        text: str,
        make: Callable[..., Any],
        on: AbstractContextManager[Any],
        samples: int | None = None,
    ) -> None:
        """Call ``make`` with tensors created ``on`` a device, for a batch of ``samples`` (default: its own).

        If ``make`` has an argument ``samples``, passes it; otherwise truncates or repeats the inputs along the first
        dimension. Raises UserError unless ``make`` returns a module and inputs.
        """
        self._text = text
        self._on = on
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if samples is not None and _takes_samples(make):
            make = partial(make, samples=samples)
        result = self._guarded(make)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
            raise UserError(
                f"{text} did not return a module and its inputs", got=type(result).__name__, expected=FORM
            )
        self.module: nn.Module = result[0].train()
        self._inputs = result[1]
        if self.samples < 1:
            raise UserError(
                f"{text}: the inputs have no samples",
                got=self.batch,
                expected="a batch of at least one sample",
            )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise UserError(f"{text}: the module has nothing to train", got="no parameter with requires_grad")
        if samples is not None and self.samples != samples:
            if isinstance(make, partial):
                raise UserError(
                    f"{text} ignored its argument samples",
                    got=f"{self.samples} samples", expected=f"{samples}",
                )  # fmt: skip
            self._inputs = self._guarded(lambda: _resized(self._inputs, self.samples, samples))

    def autocast(self, dtype: torch.dtype | None) -> None:
        """Compute in mixed precision of ``dtype`` from now on, like ``torch.autocast``."""
        if dtype is not None:
            kind = next(self.module.parameters()).device.type
            self._autocast = partial(torch.autocast, "cpu" if kind == "meta" else kind, dtype=dtype)

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """The full names of trainable parameters by owning module; shared parameters have one name everywhere."""
        names = {id(p): name for name, p in self.module.named_parameters()}
        owned = {
            name: tuple(names[id(p)] for p in module.parameters(recurse=False) if p.requires_grad)
            for name, module in self.module.named_modules()
        }
        return {name: parameters for name, parameters in owned.items() if parameters}

    @property
    def samples(self) -> int:
        """The length of the first dimension of the first input."""
        first = next((t for t in _tensors(self._inputs) if t.dim()), None)
        return 1 if first is None else len(first)

    @property
    def batch(self) -> str:
        """The shapes of the inputs as text."""
        return ", ".join("x".join(map(str, tensor.shape)) or "a number" for tensor in _tensors(self._inputs))

    def forward(self) -> torch.Tensor:
        """Run forward and return a loss: the ``loss`` of the result, or else the sum of its outputs."""
        return self._guarded(self._forward)  # type: ignore[no-any-return]

    def backward(self, begin: Callable[[Any], object], forward_done: Callable[[], object]) -> None:
        """Run forward and backward; calls ``begin`` with the inputs first, and ``forward_done`` in between."""

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
            raise UserError(f"{self._text}: no output of the module requires a gradient")
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
                fix="If the model reads tensor values, pass --device here to time it on real data.",
            ) from None  # fmt: skip


def _takes_samples(make: Callable[..., Any]) -> bool:
    try:
        return "samples" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # callables without a signature
        return False


def _resized(value: Any, length: int, samples: int) -> Any:
    """``value`` with batch tensors truncated or repeated to ``samples``."""
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
