"""Switches the script's optimizer to torch's foreach or fused implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, Literal, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError
from headway.graph.computation import Part, Timeline
from headway.job import Job, MeasuredEffect
from headway.passes.base import Pass, whole_model, with_timelines
from headway.torch_private.optimizers import before_every_step

_planned: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
FLAGS = ("foreach", "fused")
_OPTIONS = (
    "lr",
    "capturable",
    "differentiable",
)  # options that decide whether torch accepts an implementation


def switch_optimizers_of(module: nn.Module, implementation: str, optimizer: Optimizer | None) -> None:
    """Switch ``optimizer`` now, and before each step every optimizer that updates parameters of ``module``.

    A loaded state dict restores the implementation it was saved with, so the next step switches again. Raises
    UnsupportedError as ``switch`` does, here or in ``step``.
    """
    if optimizer is not None:
        switch(optimizer, implementation)
    _watch_steps()
    _planned[module] = implementation


@cache
def _watch_steps() -> None:
    """Hook every ``optimizer.step()`` of this process from now on, before strategies hook it."""
    before_every_step(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for module, implementation in list(_planned.items()):
        if not _is_switched(optimizer, implementation) and _updates(optimizer, module):
            switch(optimizer, implementation)


def switch(optimizer: Optimizer, implementation: str) -> None:
    """Switch all groups of ``optimizer`` to ``implementation``.

    Raises UnsupportedError if its class is not torch's own, if torch does not support the implementation for its
    parameters and options, or if the script chose another one.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or implementation not in optimizer.defaults:
        raise UnsupportedError(
            f"this optimizer has no known equivalent {implementation} implementation",
            got=kind.__name__, expected="a torch.optim optimizer with this option",
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    named = named_by_script(optimizer)
    if any(flag != implementation or not value for flag, value in named.items()):
        raise UnsupportedError(
            "the script already chooses an implementation of its optimizer", got=as_arguments(named),
            expected="no such option", fix="Remove the option, or leave the pass out of the plan.",
        )  # fmt: skip
    for group in optimizer.param_groups:
        _check_taken(optimizer, group, implementation)
    for group in optimizer.param_groups:
        group.update({flag: None for flag in FLAGS if flag in group} | {implementation: True})
        if implementation == "fused":
            _bring_counts(optimizer, group)


def named_by_script(optimizer: Optimizer) -> dict[str, bool]:
    """The implementations that the script chose or excluded when it created ``optimizer``.

    Read from its defaults, because groups may have the options of a state dict saved under another plan.
    """
    return {flag: bool(value) for flag in FLAGS if (value := optimizer.defaults.get(flag)) is not None}


def as_arguments(named: Mapping[str, bool]) -> str:
    """``named_by_script`` in the form of keyword arguments."""
    return ", ".join(f"{flag}={value}" for flag, value in named.items())


def _check_taken(optimizer: Optimizer, group: dict[str, Any], implementation: str) -> None:
    """Let torch decide: update tiny parameters of the same types on the same devices."""
    if group.get("differentiable"):
        raise UnsupportedError(
            f"a differentiable optimizer has no {implementation} implementation", got=type(optimizer).__name__,
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    places = {(parameter.device, parameter.dtype) for parameter in group["params"]}
    tiny = [nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for device, dtype in places]
    for parameter in tiny:
        parameter.grad = torch.zeros_like(parameter)
    options = {name: group[name] for name in _OPTIONS if name in group}
    make: Any = type(optimizer)
    try:
        torch_private.unhooked_step(make)(make(tiny, **options, **{implementation: True}))
    except (RuntimeError, ValueError, TypeError) as failure:
        raise UnsupportedError(
            f"torch does not support the {implementation} implementation here: {failure}", got=type(optimizer).__name__,
            fix="Leave the pass out of the plan.",
        ) from None  # fmt: skip


def _bring_counts(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Move step counts to the device of their parameters, where the fused kernel reads them."""
    for parameter in group["params"]:
        if parameter.device.type == "cpu":
            continue
        count = optimizer.state.get(parameter, {}).get("step")
        if isinstance(count, torch.Tensor):
            optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)


def _is_switched(optimizer: Optimizer, implementation: str) -> bool:
    return all(group.get(implementation) for group in optimizer.param_groups)


def _updates(optimizer: Optimizer, module: nn.Module) -> bool:
    parameter_ids = set(map(id, module.parameters()))
    return any(
        id(parameter) in parameter_ids for group in optimizer.param_groups for parameter in group["params"]
    )


Implementation = Literal["foreach", "fused"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("foreach", "fused")
HOW_TO_MEASURE = "Run headway measure optimizer TRACE on the device that trains."


class OptimizerImplementation(Pass):
    """Runs the model's optimizers in another of torch's implementations of the same algorithm.

    Updates are equal up to rounding: operations may be fused or ordered differently.
    """

    name: ClassVar[str] = "optimizer"
    changes_module: ClassVar[bool] = False

    implementation: Implementation
    """``foreach`` runs each operation for all parameters at once, ``fused`` all operations in one kernel."""

    @classmethod
    def proposed(cls, job: Job) -> tuple[Self, ...]:
        """The measured implementations that were faster or needed less memory."""
        if len(job.stages) > 1 or len(job.optimizers.names) != 1 or cls.name in job.refusals:
            return ()
        effects = [
            (implementation, job.measured.get(effect_name(implementation, job.optimizers.names[0])))
            for implementation in IMPLEMENTATIONS
        ]
        memory = job.model.pass_memory
        known_bytes = 0 if memory is None else memory.update_bytes
        return tuple(
            cls(implementation=implementation)
            for implementation, effect in effects
            if effect is not None and (effect.factor < 1 or effect.held_bytes < known_bytes)
        )

    def rewrite(self, job: Job) -> Job:
        """Apply the measured time and memory of updates.

        Raises UnsupportedError if they were not measured, and for jobs with several classes of optimizers.
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
                item._replace(duration_ns=round(item.duration_ns * effect.factor))
                if item.kind == Part.OPTIMIZER
                else item
                for item in timeline.items
            )
            if background_ns is not None:
                background_ns = round(background_ns * effect.factor)
            return replace(timeline, items=items, background_ns=background_ns)

        return replace(with_timelines(job, change), stages=(changed,))

    def _effect(self, job: Job) -> MeasuredEffect:
        names = job.optimizers.names
        if why := job.refusals.get(self.name):
            raise UnsupportedError(
                f"{self.describe()} does not fit this job",
                got=why,
                fix="Remove the option, or leave out the pass.",
            )
        if len(names) != 1:
            raise UnsupportedError(
                f"{self.describe()} can only be predicted for one class of optimizers",
                got=", ".join(names) or "none recorded", expected="a recording with one class of optimizers",
                fix="Leave the pass out of the plan.",
            )  # fmt: skip
        effect = job.measured.get(effect_name(self.implementation, names[0]))
        if effect is None:
            raise UnsupportedError(
                f"the effect of {self.describe()} on {names[0]} was not measured", fix=HOW_TO_MEASURE,
            )  # fmt: skip
        return effect

    def apply(self, module: nn.Module, optimizer: Any) -> nn.Module:
        """Switch ``optimizer`` now, if given, and others at their first step; returns ``module``.

        Raises UnsupportedError, now or at the first step, if an optimizer is not torch's own, does not support the
        implementation on this device, or has one chosen by the script.
        """

        switch_optimizers_of(module, self.implementation, optimizer)
        return module

    def describe(self) -> str:
        """The implementation, in words."""
        return f"{self.implementation} optimizer"


def effect_name(implementation: Implementation, optimizer: str) -> str:
    """The name of the measured effect of ``implementation`` on optimizers of this class."""
    return f"optimizer {implementation} {optimizer}"
