"""The script's own optimizer in another of torch's implementations: one operation for many tensors, or one kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from headway.errors import UnsupportedError
from headway.graph.timeline import Part, Timeline
from headway.job import Job, MeasuredEffect
from headway.passes.base import Pass
from headway.passes.computation import whole_model, with_timelines

if TYPE_CHECKING:
    from torch import nn

Implementation = Literal["foreach", "fused"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("foreach", "fused")
HOW_TO_MEASURE = "Run python -m headway.measuring.optimizers TRACE on the device that trains."


class OptimizerImplementation(Pass):
    """The optimizers that update the model do so in another of torch's implementations of the same algorithm.

    The update is the same but for rounding: operations are the same, but may be contracted or ordered differently.
    """

    name: ClassVar[str] = "optimizer"
    changes_module: ClassVar[bool] = False

    implementation: Implementation
    """``foreach`` updates all parameters by one operation after another, ``fused`` in one kernel."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """The implementations that were measured, and were faster or needed less memory."""
        if len(job.stages) > 1 or len(job.optimizers.names) != 1 or cls.name in job.refusals:
            return ()
        found = [
            (each, job.measured.get(effect_name(each, job.optimizers.names[0]))) for each in IMPLEMENTATIONS
        ]
        memory = job.model.pass_memory
        known_bytes = 0 if memory is None else memory.update_bytes
        return tuple(
            cls(implementation=each)
            for each, effect in found
            if effect is not None and (effect.factor < 1 or effect.held_bytes < known_bytes)
        )

    def rewrite(self, job: Job) -> Job:
        """Updates take as many times as long, and hold as much, as was measured.

        Raises UnsupportedError where that was not measured, and for several kinds of optimizers.
        """
        model = whole_model(job, "another implementation of the optimizer")
        effect = self._effect(job)
        memory = model.pass_memory
        if memory is not None:
            memory = memory.model_copy(update={"update_bytes": effect.held_bytes})
        changed = model.model_copy(update={"pass_memory": memory})

        def change(timeline: Timeline) -> Timeline:
            background_ns = timeline.background_ns
            items = tuple(
                each._replace(duration_ns=round(each.duration_ns * effect.factor))
                if each.kind == Part.OPTIMIZER
                else each
                for each in timeline.items
            )
            if background_ns is not None:
                background_ns = round(background_ns * effect.factor)
            return replace(timeline, items=items, background_ns=background_ns)

        return replace(with_timelines(job, change), stages=(changed,))

    def _effect(self, job: Job) -> MeasuredEffect:
        names = job.optimizers.names
        if why := job.refusals.get(self.name):
            raise UnsupportedError(
                f"{self.describe()} is not for this job", got=why, fix="Leave the option out, or the pass."
            )
        if len(names) != 1:
            raise UnsupportedError(
                f"{self.describe()} is predicted for one kind of optimizer", got=", ".join(names) or "none known",
                expected="a recording in which optimizers of one class stepped", fix="Leave the pass out of the plan.",
            )  # fmt: skip
        effect = job.measured.get(effect_name(self.implementation, names[0]))
        if effect is None:
            raise UnsupportedError(
                f"it was not measured what {self.describe()} does to {names[0]}", fix=HOW_TO_MEASURE,
            )  # fmt: skip
        return effect

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """``module`` itself. Its optimizers change when they first step; ``optimizer``, where it is given, immediately.

        Raises UnsupportedError for an optimizer that is not torch's own, has no such implementation, is not to be used
        with it on this device, or was given one by the script; then, or when it first steps.
        """
        from headway.passes.optimizer_switch import switch_optimizers_of

        switch_optimizers_of(module, self.implementation, optimizer)
        return module

    def describe(self) -> str:
        """Say which implementation."""
        return f"{self.implementation} optimizer"


def effect_name(implementation: Implementation, optimizer: str) -> str:
    """The name under which it is known what ``implementation`` does to the optimizer of that class."""
    return f"optimizer {implementation} {optimizer}"
