"""Base classes of passes whose effect must be measured, by running the job's own command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field, ValidationError, field_validator

from headway.errors import UnsupportedError
from headway.graph.computation import Part, Timeline
from headway.job import Job, MeasuredEffect
from headway.model import ModelSpec
from headway.passes.base import Pass, check_apart, check_trained, whole_model, with_timelines


class MeasuredPass(Pass):
    """A pass that scales the times of parts of a step, and replaces their memory, as measured for this very pass."""

    measured_by: ClassVar[str] = ""
    """The command that measures it, without ``-- COMMAND``; by default ``headway measure`` with its options."""

    parts: ClassVar[tuple[str, ...]] = (Part.FORWARD, Part.BACKWARD)
    """The parts of a step whose time it changes; the first one's effect also has the memory."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """All measured passes of this kind; a replay decides whether they help."""
        proposals = []
        prefix, suffix = f"{cls.name} ", f" {cls.parts[0]}"
        for effect in job.measured:
            if effect.startswith(prefix) and effect.endswith(suffix):
                try:
                    proposals.append(cls.model_validate_json(effect[len(prefix) : -len(suffix)]))
                except ValidationError:  # of another version
                    continue
        return tuple(proposals)

    def effect_name(self, part: str) -> str:
        """The name of the measured effect of this pass on ``part`` of a step."""
        return f"{self.name} {self.model_dump_json()} {part}"

    def rewrite(self, job: Job) -> Job:
        """Apply the measured times and memory.

        Memory was measured without other passes, so it is only replaced if no other pass can stand before this one.
        Raises UnsupportedError if the effect was not measured, or if the pass does not support the model.
        """
        model = whole_model(job, f"the pass {self.name}")
        self.check_model(model)
        effects = self._effects(job)
        if not self.stands_first:
            return with_timelines(job, self._changed(effects))
        recorded, watched = model.pass_memory, effects[self.parts[0]].memory
        if recorded is not None and watched is not None:  # the update stays as it is
            watched = watched.model_copy(update={"update_bytes": recorded.update_bytes})
        changed = model.model_copy(update={"pass_memory": watched})
        return replace(with_timelines(job, self._changed(effects)), stages=(changed,))

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError if the pass does not support the model."""

    def rearranged(self, timeline: Timeline) -> Timeline:
        """``timeline`` with gradients and parameter uses moved as under this pass."""
        return timeline

    def _effects(self, job: Job) -> Mapping[str, MeasuredEffect]:
        effects = {part: job.measured.get(self.effect_name(part)) for part in self.parts}
        measured = {part: effect for part, effect in effects.items() if effect is not None}
        if len(measured) < len(self.parts):
            options = self.model_dump(mode="json", exclude_defaults=True).items()
            words = "".join(f" '{name}={json.dumps(value)}'" for name, value in options)
            measured_by = self.measured_by or f"headway measure {self.name} TRACE{words}"
            raise UnsupportedError(
                f"the effect of {self.describe()} on this job was not measured",
                fix=f"Run {measured_by} -- COMMAND.",
            )
        return measured

    def _changed(self, effects: Mapping[str, MeasuredEffect]) -> Callable[[Timeline], Timeline]:
        def change(timeline: Timeline) -> Timeline:
            items = tuple(
                item._replace(duration_ns=round(item.duration_ns * effects[item.kind].factor))
                if item.kind in effects
                else item
                for item in timeline.items
            )
            return self.rearranged(replace(timeline, items=items))

        return change


class MeasuredModules(MeasuredPass):
    """A measured pass that changes some modules."""

    modules: tuple[str, ...] = Field(max_length=4096)
    """Paths of modules in the wrapped model, as in ``named_modules``."""

    @field_validator("modules")
    @classmethod
    def _apart(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        return check_apart(modules)

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError for modules that do not train."""
        check_trained(self.modules, model)
