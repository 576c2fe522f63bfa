"""Mixed precision: runs modules under autocast to bfloat16 or float16.

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
from headway.passes.other_forward import give_call, map_tensors, module_at
from headway.trace.events import Read

_LEAVE_OUT = "Leave the pass precision out of the plan."


def compute_under_autocast(root: nn.Module, paths: Sequence[str], dtype: str) -> None:
    """Run the modules at ``paths`` in ``root``, by default all of it, under autocast to ``dtype``.

    float16 scales gradients and does not allow ``paths``. Raises UnsupportedError for unknown paths, parameters that
    are not float32 or not on one type of device, and modules changed by another pass.
    """
    parameters = list(root.parameters())
    unsupported = sorted(
        {str(parameter.dtype) for parameter in parameters if parameter.dtype is not torch.float32}
    )
    if unsupported:
        raise UnsupportedError(
            "autocast needs float32 parameters", got=", ".join(unsupported),
            expected="torch.float32", fix=_LEAVE_OUT,
        )  # fmt: skip
    devices = {parameter.device.type for parameter in parameters}
    if len(devices) != 1 or not torch.amp.is_autocast_available(*devices):
        raise UnsupportedError(
            "autocast needs all parameters on one type of device that supports it",
            got=", ".join(sorted(devices)) or "no parameters", fix=_LEAVE_OUT,
        )  # fmt: skip
    (device,) = devices
    assert dtype != "float16" or not paths, "gradients can only be scaled for a whole model"
    scale = LossScale(root) if dtype == "float16" else None
    for path in paths or ("",):
        give_call(
            module_at(root, path, "run under autocast"),
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
        if getattr(
            self._inside, "forward", False
        ):  # the module calls itself, as in a training step of Lightning
            return forward(*args, **kwargs)
        if torch.is_autocast_enabled(self._device):
            raise UnsupportedError(
                "the script already calls its model under autocast",
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
        return map_tensors(out, self._widened)

    def _widened(self, value: torch.Tensor) -> torch.Tensor:
        """Convert outputs to float32, which the script and the following modules expect."""
        return value.float() if value.dtype is self._dtype else value


class Precision(MeasuredModules):
    """Runs forward and backward of each of ``modules``, or of the whole model, under ``torch.autocast``.

    Parameters, gradients and module outputs stay float32.
    """

    name: ClassVar[str] = "precision"
    stands_first: ClassVar[bool] = True
    measured_by: ClassVar[str] = "headway measure precision TRACE [dtype=float16] [MODULE ...]"

    dtype: Literal["bfloat16", "float16"]
    """The type of computation. float16 scales gradients, and skips steps whose gradients overflow."""

    modules: tuple[str, ...] = Field(default=(), max_length=4096)
    """Paths of modules in the wrapped model, as in ``named_modules``; empty for the whole model."""

    @model_validator(mode="after")
    def _scales_a_whole_model(self) -> Self:
        if self.dtype == "float16" and self.modules:
            raise ValueError(
                "float16 needs the whole model, because it scales the loss; leave out modules, or use bfloat16"
            )
        return self

    @property
    def changes_training(self) -> str:
        """Computation is rounded, and float16 may skip steps."""
        left_out = ", and steps whose gradients overflow are skipped" if self.leaves_out_steps else ""
        return f"{self._part()} computes in {self.dtype}{left_out}"

    @property
    def leaves_out_steps(self) -> bool:
        """True for float16, whose gradients may overflow."""
        return self.dtype == "float16"

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError for modules without trained parameters, and parameters that are not float32."""
        super().check_model(model)
        unsupported = sorted({parameter.dtype for parameter in model.parameters} - {"float32"})
        if unsupported:
            raise UnsupportedError(
                "autocast needs float32 parameters", got=", ".join(unsupported),
                expected="float32", fix="Leave the pass out of the plan.",
            )  # fmt: skip

    def rearranged(self, timeline: Timeline) -> Timeline:
        """In float16, add the check of gradients before the step."""
        if not self.leaves_out_steps:
            return timeline
        items = timeline.items
        at = next(
            (at for at, item in enumerate(items) if item.kind in (Point.STEP, Part.OPTIMIZER)), len(items)
        )
        return replace(timeline, items=(*items[:at], Item(Part.READ, Read.UNSCALE), *items[at:]))

    def prepare(self) -> None:
        """In float16, hook optimizer steps, because some are skipped."""
        if self.leaves_out_steps:
            from headway.passes.loss_scale import watch_steps

            watch_steps()

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Run ``module`` under autocast; returns it.

        Raises UnsupportedError for unknown paths and parameters that are not float32; in forward, if the script itself
        uses autocast; and in float16, in backward or step, if the loss uses parameters directly or a step cannot be
        skipped.
        """
        del optimizer

        compute_under_autocast(module, self.modules, self.dtype)
        return module

    def describe(self) -> str:
        """The type of computation, and the modules."""
        where = f" in {self._part()}" if self.modules else ""
        return f"{self.dtype} autocast{where}"

    def _part(self) -> str:
        if not self.modules:
            return "the model"
        return self.modules[0] if len(self.modules) == 1 else f"a part of {len(self.modules)} modules"
