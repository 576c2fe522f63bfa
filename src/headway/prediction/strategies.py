"""Strategies as people name them on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from headway import files
from headway.errors import UserError
from headway.plan import Plan
from headway.prediction.workload import Workload
from headway.strategies.base import Strategy
from headway.strategies.registry import STRATEGIES

FORM = "a name with options, as in ddp, ddp:bucket_cap_mb=10 or decoupled:gather=gradients, or a plan file"
USUAL = ("ddp", "decoupled:gather=parameters", "decoupled:gather=gradients")


def strategies_named(texts: Iterable[str], workload: Workload) -> dict[str, Strategy]:
    """The strategies that ``texts`` name, each under its text; the usual ones for none.

    Raises UserError for a name or an option that there is not, PlanError for a plan that was made for another model.
    """
    return {text: _named(text, workload) for text in (tuple(texts) or USUAL)}


def _named(text: str, workload: Workload) -> Strategy:
    if Path(text).suffix in (".yaml", ".yml"):
        plan = Plan.load(text)
        plan.check(workload.spec, plan.world_size)
        return plan.strategy
    name, _, options = text.partition(":")
    if name not in STRATEGIES:
        raise UserError(
            "there is no such strategy", got=repr(text), expected=f"{FORM}; {' or '.join(STRATEGIES)}"
        )
    given: dict[str, object] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise UserError("--strategy cannot be read", got=repr(text), expected=FORM)
        if key in given:
            raise UserError(f"--strategy {name}: {key} is said twice", got=repr(text), expected="one of them")
        try:
            given[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            raise UserError(f"--strategy {name}: {key} cannot be read", got=repr(value)) from None
    return files.validate(given, STRATEGIES[name], UserError, f"--strategy {name}")
