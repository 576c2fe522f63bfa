"""The page about passes shows plans as they are read."""

from __future__ import annotations

from pathlib import Path

import yaml

from headway.passes.registry import SHIPPED
from headway.plan import Plan
from headway.plan.plan import PlannedModel

PAGE = Path(__file__).parents[2] / "docs" / "passes.md"


def test_every_pass_is_shown_as_plans_have_it() -> None:
    shown = [each for each in PAGE.read_text().split("\n\n") if each.startswith("    passes:")]
    model = PlannedModel(parameters=0, size_bytes=0, fingerprint="")
    named = []
    for each in shown:
        plan = Plan.model_validate(
            {"mesh": {"data": 2}, "parallel": {"data": {"ddp": {}}}, "model": model, **yaml.safe_load(each)}
        )
        named += [one.name for one in plan.passes]
        assert plan.model_dump(mode="json")["passes"] == yaml.safe_load(each)["passes"]
    assert named == list(SHIPPED)
