"""Passes whose effect on what is computed is known from runs of the job's own command alone."""

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
    """Parts of a step take so many times as long, and hold as much, as was measured of this very pass."""

    measured_by: ClassVar[str] = ""
    """The command that measures it, up to ``-- COMMAND``; by default the one that measures any pass (``pass_runs``)."""

    parts: ClassVar[tuple[str, ...]] = (Part.FORWARD, Part.BACKWARD)
    """The parts of a step whose time it changes; memory is said with the first."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """Whatever was measured: a replay tells whether it gains."""
        found = []
        prefix, suffix = f"{cls.name} ", f" {cls.parts[0]}"
        for effect in job.measured:
            if effect.startswith(prefix) and effect.endswith(suffix):
                try:
                    found.append(cls.model_validate_json(effect[len(prefix) : -len(suffix)]))
                except ValidationError:  # of another version
                    continue
        return tuple(found)

    def effect_name(self, part: str) -> str:
        """The name under which it is known what this pass does to that part of a step."""
        return f"{self.name} {self.model_dump_json()} {part}"

    def rewrite(self, job: Job) -> Job:
        """Parts of a step take as many times as long, and hold as much, as was measured.

        Memory is that of runs without other passes, and so it is left as it is where others may stand before.
        Raises UnsupportedError where that was not measured, and for models that the pass is not for.
        """
        model = whole_model(job, f"the pass {self.name}")
        self.check_model(model)
        effects = self._effects(job)
        if not self.stands_first:
            return with_timelines(job, self._changed(effects))
        known, watched = model.pass_memory, effects[self.parts[0]].memory
        if known is not None and watched is not None:  # the update stays as it is
            watched = watched.model_copy(update={"update_bytes": known.update_bytes})
        changed = model.model_copy(update={"pass_memory": watched})
        return replace(with_timelines(job, self._changed(effects)), stages=(changed,))

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError for a model that the pass is not for."""

    def rearranged(self, timeline: Timeline) -> Timeline:
        """``timeline`` with gradients and uses of parameters where they are under this pass."""
        return timeline

    def _effects(self, job: Job) -> Mapping[str, MeasuredEffect]:
        found = {part: job.measured.get(self.effect_name(part)) for part in self.parts}
        known = {part: effect for part, effect in found.items() if effect is not None}
        if len(known) < len(self.parts):
            options = self.model_dump(mode="json", exclude_defaults=True).items()
            words = "".join(f" '{name}={json.dumps(value)}'" for name, value in options)
            measured_by = (
                self.measured_by or f"python -m headway.measuring.pass_runs TRACE {self.name}{words}"
            )
            raise UnsupportedError(
                f"it was not measured what {self.describe()} does to this job",
                fix=f"Run {measured_by} -- COMMAND.",
            )
        return known

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
    """One that changes some modules."""

    modules: tuple[str, ...] = Field(max_length=4096)
    """Paths of modules within the wrapped model, as ``named_modules`` has them."""

    @field_validator("modules")
    @classmethod
    def _apart(cls, modules: tuple[str, ...]) -> tuple[str, ...]:
        return check_apart(modules)

    def check_model(self, model: ModelSpec) -> None:
        """Raise UnsupportedError for modules that do not train."""
        check_trained(self.modules, model)
