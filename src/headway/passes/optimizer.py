"""The script's own optimizer in another of torch's implementations: one operation for many tensors, or one kernel."""

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
_OPTIONS = ("lr", "capturable", "differentiable")  # what torch looks at to refuse an implementation


def switch_optimizers_of(module: nn.Module, implementation: str, optimizer: Optimizer | None) -> None:
    """Switch every optimizer that updates parameters of ``module`` before it steps, ``optimizer`` now.

    State dicts that the script loads bring the implementation that they were saved with; the next step switches again.
    Raises UnsupportedError as ``switch`` does, here or in ``step``.
    """
    if optimizer is not None:
        switch(optimizer, implementation)
    _watch_steps()
    _planned[module] = implementation


@cache
def _watch_steps() -> None:
    """Notice every ``optimizer.step()`` of this process from now on, before a strategy does that is told later."""
    before_every_step(_before_step)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for module, implementation in list(_planned.items()):
        if not _is_switched(optimizer, implementation) and _updates(optimizer, module):
            switch(optimizer, implementation)


def switch(optimizer: Optimizer, implementation: str) -> None:
    """Have ``optimizer`` step in ``implementation`` from now on, in all of its groups.

    Raises UnsupportedError where its class is not torch's own, where torch does not have or take that for its
    parameters and options, and where the script names another one.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or implementation not in optimizer.defaults:
        raise UnsupportedError(
            f"this optimizer has no {implementation} implementation that is known to do the same",
            got=kind.__name__, expected="one of torch.optim that takes that option",
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    named = named_by_script(optimizer)
    if any(flag != implementation or not value for flag, value in named.items()):
        raise UnsupportedError(
            "the script names an implementation of its optimizer itself", got=said(named),
            expected="one that torch chooses", fix="Leave the option out, or the pass out of the plan.",
        )  # fmt: skip
    for group in optimizer.param_groups:
        _check_taken(optimizer, group, implementation)
    for group in optimizer.param_groups:
        group.update({flag: None for flag in FLAGS if flag in group} | {implementation: True})
        if implementation == "fused":
            _bring_counts(optimizer, group)


def named_by_script(optimizer: Optimizer) -> dict[str, bool]:
    """The implementations that the script asked for or ruled out when it made ``optimizer``, in which torch has none.

    Groups do not tell: they may hold what a state dict brought that was saved under another plan.
    """
    return {flag: bool(value) for flag in FLAGS if (value := optimizer.defaults.get(flag)) is not None}


def said(named: Mapping[str, bool]) -> str:
    """``named_by_script`` as a script has it."""
    return ", ".join(f"{flag}={value}" for flag, value in named.items())


def _check_taken(optimizer: Optimizer, group: dict[str, Any], implementation: str) -> None:
    """Ask torch itself: have it update tiny parameters of the same types on the same devices."""
    if group.get("differentiable"):
        raise UnsupportedError(
            f"a differentiable optimizer has no {implementation} implementation", got=type(optimizer).__name__,
            fix="Leave the pass out of the plan.",
        )  # fmt: skip
    places = {(each.device, each.dtype) for each in group["params"]}
    tiny = [nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for device, dtype in places]
    for each in tiny:
        each.grad = torch.zeros_like(each)
    options = {name: group[name] for name in _OPTIONS if name in group}
    make: Any = type(optimizer)
    try:
        torch_private.unhooked_step(make)(make(tiny, **options, **{implementation: True}))
    except (RuntimeError, ValueError, TypeError) as failure:
        raise UnsupportedError(
            f"torch takes no {implementation} implementation here: {failure}", got=type(optimizer).__name__,
            fix="Leave the pass out of the plan.",
        ) from None  # fmt: skip


def _bring_counts(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """A kernel reads how many steps there were on its own device."""
    for parameter in group["params"]:
        if parameter.device.type == "cpu":
            continue
        count = optimizer.state.get(parameter, {}).get("step")
        if isinstance(count, torch.Tensor):
            optimizer.state[parameter]["step"] = count.to(parameter.device, torch.float32)


def _is_switched(optimizer: Optimizer, implementation: str) -> bool:
    return all(group.get(implementation) for group in optimizer.param_groups)


def _updates(optimizer: Optimizer, module: nn.Module) -> bool:
    own = set(map(id, module.parameters()))
    return any(id(each) in own for group in optimizer.param_groups for each in group["params"])


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

        switch_optimizers_of(module, self.implementation, optimizer)
        return module

    def describe(self) -> str:
        """Say which implementation."""
        return f"{self.implementation} optimizer"


def effect_name(implementation: Implementation, optimizer: str) -> str:
    """The name under which it is known what ``implementation`` does to the optimizer of that class."""
    return f"optimizer {implementation} {optimizer}"
