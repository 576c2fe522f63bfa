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
from headway.units import alternatives, options_in

FORM = (
    "a name with options, as in ddp, ddp:bucket_cap_mb=10, ddp:bucket_caps_mb=[1,25] or decoupled:gather=gradients, "
    "or a plan file"
)
MOST_ALTERNATIVES = 64


def strategies_named(texts: Iterable[str], workload: Workload) -> dict[str, Strategy]:
    """The strategies that ``texts`` name, each under its text; the usual ones for none.

    A text with alternatives, as in ``ddp:bucket_cap_mb=5|25``, names a strategy for each. Raises UserError for a name
    or an option that there is not, PlanError for a plan that was made for another model.
    """
    return {
        each: _named(each, workload)
        for text in (tuple(texts) or usual())
        for each in ([text] if _is_plan_file(text) else alternatives(text, MOST_ALTERNATIVES, "--strategy"))
    }


def _is_plan_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml")


def usual() -> tuple[str, ...]:
    """The strategies that are predicted by default."""
    return tuple(
        f"{name}:{options}".rstrip(":")
        for name, plugin in registry.plugins().items()
        for options in plugin.usual
    )


def _named(text: str, workload: Workload) -> Strategy:
    if _is_plan_file(text):
        plan = Plan.load(text)
        plan.check(workload.spec, plan.world_size)
        if plan.passes:
            raise UserError(
                "a plan with passes cannot be predicted without a trace",
                got=", ".join(pass_.describe() for pass_ in plan.passes),
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
    for key, value in options_in(options, f"--strategy {name}"):
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
