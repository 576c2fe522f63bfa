"""Mixed precision: modules compute under autocast, in bfloat16 or float16 where torch deems that safe.

After Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with parameters and gradients in float32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from headway.errors import UnsupportedError
from headway.graph.computation import Item, Part, Point, Timeline
from headway.model import ModelSpec
from headway.passes.loss_scale import LossScale
from headway.passes.measured import MeasuredModules
from headway.passes.other_forward import each_tensor, give_call, module_at
from headway.trace.events import Read

_LEAVE_OUT = "Leave the pass precision out of the plan."


def compute_under_autocast(root: nn.Module, paths: Sequence[str], dtype: str) -> None:
    """Have the modules at ``paths`` in ``root``, or ``root`` where there are none, compute under autocast to ``dtype``.

    In float16 gradients are scaled, and there are no ``paths``. Raises UnsupportedError for a path that it does not
    have, parameters that are not float32 or not on one kind of device, and a module that another pass has changed.
    """
    parameters = list(root.parameters())
    others = sorted({str(each.dtype) for each in parameters if each.dtype is not torch.float32})
    if others:
        raise UnsupportedError(
            "this model has parameters that autocast is not for", got=", ".join(others),
            expected="torch.float32", fix=_LEAVE_OUT,
        )  # fmt: skip
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) != 1 or not torch.amp.is_autocast_available(*devices):
        raise UnsupportedError(
            "autocast needs parameters on one kind of device that has it",
            got=", ".join(sorted(devices)) or "no parameters", fix=_LEAVE_OUT,
        )  # fmt: skip
    (device,) = devices
    assert dtype != "float16" or not paths, "of a part of a model gradients are not told apart"
    scale = LossScale(root) if dtype == "float16" else None
    for path in paths or ("",):
        give_call(
            module_at(root, path, "compute under autocast"),
            repr(path) if path else type(root).__name__,
            _UnderAutocast(device, dtype, scale),
        )


class _UnderAutocast:
    def __init__(self, device: str, dtype: str, scale: LossScale | None) -> None:
        self._device = device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._scale = scale
        self._inside = threading.local()

    def __call__(self, forward: Callable[..., Any], _module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._inside, "forward", False):  # the module calls itself, as a step of Lightning's does
            return forward(*args, **kwargs)
        if torch.is_autocast_enabled(self._device):
            raise UnsupportedError(
                "the script calls its model under autocast already",
                got=f"autocast to {torch.get_autocast_dtype(self._device)}",
                expected="a script that computes in float32", fix=_LEAVE_OUT,
            )  # fmt: skip
        if self._scale is not None:
            args, kwargs = self._scale.entering((args, kwargs))
        self._inside.forward = True
        try:
            with torch.autocast(self._device, dtype=self._dtype):
                out = forward(*args, **kwargs)
        finally:
            self._inside.forward = False
        if self._scale is not None:
            out = self._scale.leaving(out)
        return each_tensor(out, self._widened)

    def _widened(self, value: torch.Tensor) -> torch.Tensor:
        """Float32 is what the script, and the modules behind, expect."""
        return value.float() if value.dtype is self._dtype else value


class Precision(MeasuredModules):
    """The forward of each of ``modules``, or of the model, runs under ``torch.autocast``, and so does its backward.

    Parameters and gradients stay float32, and so does what a module puts out, whatever it computes with.
    """

    name: ClassVar[str] = "precision"
    stands_first: ClassVar[bool] = True
    measured_by: ClassVar[str] = "python -m headway.measuring.precision TRACE [dtype=float16] [MODULE ...]"

    dtype: Literal["bfloat16", "float16"]
    """What is computed with. In float16 gradients are scaled, and steps are left out whose gradients overflow."""

    modules: tuple[str, ...] = Field(default=(), max_length=4096)
    """Paths of modules within the wrapped model, as ``named_modules`` has them; none for the whole model."""

    @model_validator(mode="after")
    def _scales_a_whole_model(self) -> Self:
        if self.dtype == "float16" and self.modules:
            raise ValueError(
                "float16 is for whole models, whose losses are scaled; leave out modules, or use bfloat16"
            )
        return self

    @property
    def changes_training(self) -> str:
        """That it is computed with fewer digits, and that steps may be left out."""
        left_out = ", and steps whose gradients overflow are left out" if self.leaves_out_steps else ""
        return f"{self._part()} computes in {self.dtype}{left_out}"

    @property
    def leaves_out_steps(self) -> bool:
        """In float16, where gradients overflow."""
        return self.dtype == "float16"

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError for modules that do not train, and parameters that are not float32."""
        super().check_model(model)
        others = sorted({parameter.dtype for parameter in model.parameters} - {"float32"})
        if others:
            raise UnsupportedError(
                "this model has parameters that autocast is not for", got=", ".join(others),
                expected="float32", fix="Leave the pass out of the plan.",
            )  # fmt: skip

    def rearranged(self, timeline: Timeline) -> Timeline:
        """In float16 gradients are looked at before the step."""
        if not self.leaves_out_steps:
            return timeline
        items = timeline.items
        at = next(
            (at for at, item in enumerate(items) if item.kind in (Point.STEP, Part.OPTIMIZER)), len(items)
        )
        return replace(timeline, items=(*items[:at], Item(Part.READ, Read.UNSCALE), *items[at:]))

    def prepare(self) -> None:
        """Ask before each step from now on: in float16 some are left out."""
        if self.leaves_out_steps:
            from headway.passes.loss_scale import watch_steps

            watch_steps()

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, which computes under autocast.

        Raises UnsupportedError for a path that it does not have, and parameters that are not float32; in forward, where
        the script is under autocast itself; in float16, in backward or in a step, where a loss uses parameters besides
        through the model, or a step cannot be left out.
        """
        del optimizer

        compute_under_autocast(module, self.modules, self.dtype)
        return module

    def describe(self) -> str:
        """Say in what is computed, and where."""
        where = f" in {self._part()}" if self.modules else ""
        return f"{self.dtype} autocast{where}"

    def _part(self) -> str:
        if not self.modules:
            return "the model"
        return self.modules[0] if len(self.modules) == 1 else f"a part of {len(self.modules)} modules"
