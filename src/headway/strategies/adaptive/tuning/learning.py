"""What watched steps teach: the step profile of the rank that computes the longest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.graph.step_profile import StepProfile
from headway.graph.update_cost import UpdateCost
from headway.model import ModelSpec
from headway.strategies.adaptive.tuning.watch import Period


@dataclass(frozen=True, slots=True)
class Steps:
    """What one rank's watched steps teach. ``busy`` is the share of a step in which its thread used a CPU."""

    profile: StepProfile
    update_overhead_ns: float
    busy: float


def numbers_of(periods: Sequence[Period], update: UpdateCost, model: ModelSpec) -> list[float]:
    """A rank's watched steps as equally many numbers on every rank: medians, NaN for what was not seen.

    Undisturbed steps count, or all where none was.
    """
    calm = [period for period in periods if not period.disturbed] or list(periods)
    modules = _modules(model)
    rows = [_row(period, model, modules) for period in calm]
    width = 6 + len(modules) + len(model.parameters)
    if not rows:
        return [update.overhead_ns, update.whole_ns, *[math.nan] * width]
    table = np.array(rows, dtype=np.float64)
    seen = ~np.isnan(table).all(axis=0)
    medians = np.full(width, math.nan)
    medians[seen] = np.nanmedian(table[:, seen], axis=0)
    return [update.overhead_ns, update.whole_ns, *medians.tolist()]


def slowest_steps(numbers: Sequence[Sequence[float]], model: ModelSpec) -> Steps | None:
    """What the rank with the longest computation saw; None where a rank saw no step at all."""
    if any(math.isnan(own[2]) for own in numbers):
        return None
    chosen = max(numbers, key=lambda own: own[1] + sum(own[2:7]))
    overhead_ns, whole_ns, forward, between, backward, tail, rest, _, *offsets = chosen
    modules = _modules(model)
    needs, ready = offsets[: len(modules)], offsets[len(modules) :]
    names = [parameter.name for parameter in model.parameters]
    profile = StepProfile(
        forward_ns=round(forward),
        backward_ns=round(backward),
        needs_ns=_known(modules, needs),
        ready_ns=_known(names, ready),
        between_ns=round(between),
        tail_ns=round(tail),
        rest_ns=round(rest),
        optimizer_ns=round(whole_ns),
    )
    return Steps(profile, overhead_ns, max(own[7] for own in numbers))


def _row(period: Period, model: ModelSpec, modules: Sequence[str]) -> list[float]:
    first, last = min(period.ready.values()), max(period.ready.values())
    forward_end = period.begin if period.forward_end is None else period.forward_end
    backward = max(forward_end, first if period.backward is None else min(period.backward, first))
    step_end = last if period.step_end is None else max(last, period.step_end)
    needs = [_need(period, module) for module in modules]
    ready = [period.ready.get(p.name, math.nan) - backward for p in model.parameters]
    return [
        forward_end - period.begin,
        backward - forward_end,
        max(0, last - backward),
        step_end - last,
        max(0, period.end - step_end),
        period.busy,
        *needs,
        *ready,
    ]


def _need(period: Period, module: str) -> float:
    """When forward called ``module``, or the nearest around it, whose code can use parameters of its own accord."""
    while module not in period.needs and module:
        module = module.rpartition(".")[0]
    return period.needs.get(module, math.nan) - period.begin


def _modules(model: ModelSpec) -> list[str]:
    return list(dict.fromkeys(parameter.module for parameter in model.parameters))


def _known(names: Sequence[str], offsets: Sequence[float]) -> dict[str, int]:
    known = {
        name: max(0, round(value))
        for name, value in zip(names, offsets, strict=True)
        if not math.isnan(value)
    }
    return dict(sorted(known.items(), key=lambda pair: pair[1]))
