"""Parses the strategies of ``headway predict --strategy``."""

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
    """Parse ``texts`` into strategies by text; without texts, returns the default ones.

    A text with alternatives, such as ``ddp:bucket_cap_mb=5|25``, gives one strategy for each. Raises UserError for an
    unknown name or option, and PlanError for a plan for another model.
    """
    return {
        choice: _named(choice, workload)
        for text in (tuple(texts) or usual())
        for choice in ([text] if _is_plan_file(text) else alternatives(text, MOST_ALTERNATIVES, "--strategy"))
    }


def _is_plan_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml")


def usual() -> tuple[str, ...]:
    """The strategies to predict by default."""
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
                "predicting a plan with passes requires a trace",
                got=", ".join(pass_.describe() for pass_ in plan.passes),
                expected="a plan without passes",
                fix="Replay a recording of the job under the plan: headway replay --plan.",
            )
        return plan.strategy
    name, _, options = text.partition(":")
    registry.check_usable(name)
    if name not in registry.names():
        raise UserError(
            "unknown strategy",
            got=repr(text),
            expected=f"{FORM}; {' or '.join(registry.names())}",
            fix=did_you_mean(name, registry.names()),
        )
    values: dict[str, object] = {}
    for key, value in options_in(options, f"--strategy {name}"):
        if key in values:
            raise UserError(
                f"--strategy {name}: duplicate option {key}", got=repr(text), expected="each option once"
            )
        try:
            values[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            raise UserError(f"--strategy {name}: {key} cannot be read", got=repr(value)) from None
    today, options_today = registry.of_today(name, values)
    policy = registry.policy_named(today)
    if policy is PipelineStrategy:
        policy = PredictedPipeline
    return files.validate(options_today, policy, UserError, f"--strategy {name}")
