"""Mixed precision: modules compute under autocast, in bfloat16 where torch deems that safe.

After Micikevicius et al., "Mixed precision training" (arXiv 1710.03740), with parameters and gradients in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator

from headway.errors import UnsupportedError
from headway.graph.timeline import Part, Timeline
from headway.job import Job, MeasuredEffect
from headway.passes.base import Pass
from headway.passes.computation import whole_model, with_timelines
from headway.passes.regions import check_apart, lies_in

if TYPE_CHECKING:
    from torch import nn

PARTS = (Part.FORWARD, Part.BACKWARD)
"""The parts of a step whose time it changes: parameters, gradients and the optimizer stay as they are."""
HOW_TO_MEASURE = "Run python -m headway.measuring.precision TRACE [MODULE ...] -- COMMAND."


class Precision(Pass):
    """The forward of each of ``modules``, or of the model, runs under ``torch.autocast``, and so does its backward.

    Parameters and gradients stay float32, and so does what a module puts out, whatever it computes with.
    """

    name: ClassVar[str] = "precision"
    stands_first: ClassVar[bool] = True

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

    @field_validator("modules")
    @classmethod
    def _apart(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        return check_apart(modules)

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """Whatever was measured: a replay tells whether it gains."""
        found = []
        prefix, suffix = f"{cls.name} ", f" {Part.FORWARD}"
        for effect in job.measured:
            if effect.startswith(prefix) and effect.endswith(suffix):
                try:
                    found.append(cls.model_validate_json(effect[len(prefix) : -len(suffix)]))
                except ValidationError:  # of another version
                    continue
        return tuple(found)

    @property
    def changes_training(self) -> str:
        """That it is computed with fewer digits."""
        return f"{self._where()} computes in {self.dtype}"

    def effect_name(self, part: str) -> str:
        """The name under which it is known what this pass does to that part of a step."""
        return f"{self.name} {self.model_dump_json()} {part}"

    def rewrite(self, job: Job) -> Job:
        """Forward and backward take as many times as long, and hold as much, as was measured.

        Raises UnsupportedError where that was not measured, for modules that do not train, and for parameters that are
        not float32.
        """
        model = whole_model(job, "another precision")
        for region in self.modules:
            if not any(lies_in(each.module, region) for each in model.parameters):
                raise UnsupportedError(
                    "there is no module of that name that trains parameters", got=repr(region),
                    expected="the path of a module in the wrapped model",
                )  # fmt: skip
        others = sorted({each.dtype for each in model.parameters} - {"float32"})
        if others:
            raise UnsupportedError(
                "this model has parameters that autocast is not for", got=", ".join(others),
                expected="float32", fix="Leave the pass out of the plan.",
            )  # fmt: skip
        effects = self._effects(job)
        known, watched = model.pass_memory, effects[Part.FORWARD].memory
        if known is not None and watched is not None:  # the update stays as it is
            watched = watched.model_copy(update={"update_bytes": known.update_bytes})
        changed = model.model_copy(update={"pass_memory": watched})
        return replace(with_timelines(job, _scaling(effects)), stages=(changed,))

    def _effects(self, job: Job) -> Mapping[str, MeasuredEffect]:
        found = {part: job.measured.get(self.effect_name(part)) for part in PARTS}
        known = {part: effect for part, effect in found.items() if effect is not None}
        if len(known) < len(PARTS):
            raise UnsupportedError(
                f"it was not measured what {self.describe()} does to this job", fix=HOW_TO_MEASURE
            )
        return known

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
        where = f" in {self._where()}" if self.modules else ""
        return f"{self.dtype} autocast{where}"

    def _where(self) -> str:
        if not self.modules:
            return "the model"
        return self.modules[0] if len(self.modules) == 1 else f"a part of {len(self.modules)} modules"


def _scaling(effects: Mapping[str, MeasuredEffect]) -> Callable[[Timeline], Timeline]:
    def change(timeline: Timeline) -> Timeline:
        items = tuple(
            each._replace(duration_ns=round(each.duration_ns * effects[each.kind].factor))
            if each.kind in effects
            else each
            for each in timeline.items
        )
        return replace(timeline, items=items)

    return change
