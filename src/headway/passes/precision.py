"""Mixed precision: modules compute under autocast, in bfloat16 where torch deems that safe.

After Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with parameters and gradients in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from headway.errors import UnsupportedError
from headway.model import ModelSpec
from headway.passes.measured import MeasuredModules

if TYPE_CHECKING:
    from torch import nn


class Precision(MeasuredModules):
    """The forward of each of ``modules``, or of the model, runs under ``torch.autocast``, and so does its backward.

    Parameters and gradients stay float32, and so does what a module puts out, whatever it computes with.
    """

    name: ClassVar[str] = "precision"
    stands_first: ClassVar[bool] = True
    measured_by: ClassVar[str] = "precision TRACE [MODULE ...]"

    dtype: Literal["bfloat16"]
    """What is computed with. float16 is refused: its gradients vanish unless the script scales its losses."""

    modules: tuple[str, ...] = Field(default=(), max_length=4096)
    """Paths of modules within the wrapped model, as ``named_modules`` has them; none for the whole model."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _needs_no_scaling(cls, dtype: Any) -> Any:
        if dtype == "float16":
            raise ValueError(
                "gradients of float16 vanish unless the script scales its losses, which a plan cannot do; use bfloat16"
            )
        return dtype

    @property
    def changes_training(self) -> str:
        """That it is computed with fewer digits."""
        return f"{self._part()} computes in {self.dtype}"

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError for modules that do not train, and parameters that are not float32."""
        super().check_model(model)
        others = sorted({each.dtype for each in model.parameters} - {"float32"})
        if others:
            raise UnsupportedError(
                "this model has parameters that autocast is not for", got=", ".join(others),
                expected="float32", fix="Leave the pass out of the plan.",
            )  # fmt: skip

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself, which computes under autocast.

        Raises UnsupportedError for a path that it does not have, and parameters that are not float32; in forward, where
        the script is under autocast itself.
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
