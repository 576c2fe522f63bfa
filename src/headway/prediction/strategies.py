"""Strategies as people name them on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from headway import files
from headway.errors import UserError, did_you_mean
from headway.plan import Plan
from headway.prediction.pipelines import PredictedPipeline
from headway.prediction.workload import Workload
from headway.strategies import registry
from headway.strategies.base import Strategy
from headway.strategies.pipeline.policy import PipelineStrategy

FORM = "a name with options, as in ddp, ddp:bucket_cap_mb=10 or decoupled:gather=gradients, or a plan file"


def strategies_named(texts: Iterable[str], workload: Workload) -> dict[str, Strategy]:
    """The strategies that ``texts`` name, each under its text; the usual ones for none.

    Raises UserError for a name or an option that there is not, PlanError for a plan that was made for another model.
    """
    return {text: _named(text, workload) for text in (tuple(texts) or usual())}


def usual() -> tuple[str, ...]:
    """The strategies that are predicted by default."""
    return tuple(
        f"{name}:{options}".rstrip(":")
        for name, plugin in registry.plugins().items()
        for options in plugin.usual
    )


def _named(text: str, workload: Workload) -> Strategy:
    if Path(text).suffix in (".yaml", ".yml"):
        plan = Plan.load(text)
        plan.check(workload.spec, plan.world_size)
        if plan.passes:
            raise UserError(
                "a plan with passes cannot be predicted without a trace",
                got=", ".join(each.describe() for each in plan.passes),
                expected="a plan without passes",
                fix="Replay a recording of the job under it: headway replay --plan.",
            )
        return plan.strategy
    name, _, options = text.partition(":")
    registry.check_usable(name)
    if name not in registry.names():
        raise UserError(
            "there is no such strategy",
            got=repr(text),
            expected=f"{FORM}; {' or '.join(registry.names())}",
            fix=did_you_mean(name, registry.names()),
        )
    given: dict[str, object] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise UserError("--strategy cannot be read", got=repr(text), expected=FORM)
        if key in given:
            raise UserError(
                f"--strategy {name}: {key} is given twice", got=repr(text), expected="one of them"
            )
        try:
            given[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            raise UserError(f"--strategy {name}: {key} cannot be read", got=repr(value)) from None
    today, options_today = registry.of_today(name, given)
    policy = registry.policy_named(today)
    if policy is PipelineStrategy:
        policy = PredictedPipeline
    return files.validate(options_today, policy, UserError, f"--strategy {name}")
