"""Mixed precision: modules compute under autocast, in bfloat16 or float16 where torch deems that safe.

After Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with parameters and gradients in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headway.errors import UnsupportedError
from headway.graph.timeline import Item, Part, Point, Timeline
from headway.model import ModelSpec
from headway.passes.measured import MeasuredModules
from headway.trace.events import Read

if TYPE_CHECKING:
    from torch import nn


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
        others = sorted({each.dtype for each in model.parameters} - {"float32"})
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
        from headway.passes.autocast import compute_under_autocast

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
