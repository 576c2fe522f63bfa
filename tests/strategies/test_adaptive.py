"""Plans of adaptive training: as they are written today, and as earlier formats had them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.models import layered_model

import headway
from headway import files
from headway.job import Job
from headway.model import ModelSpec
from headway.plan import Plan
from headway.strategies import registry
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy

HOME = DecoupledStrategy(bucket_cap_bytes=5000)
DDP = DistributedDataParallelStrategy(bucket_cap_mb=2)
SERVERS = ParameterServerStrategy(bucket_cap_mb=2)

EARLIER: list[tuple[dict[str, Any], Strategy]] = [
    ({"tune": True}, AdaptiveStrategy(begin_as=HOME)),
    ({"adapt": True, "tune": False}, AdaptiveStrategy(begin_as=HOME, tune=False, adapt=True)),
    (
        {"adapt": True, "begin_as": {"bucket_cap_mb": 2}},
        AdaptiveStrategy(begin_as=DDP, search_from=HOME, tune=False, adapt=True),
    ),
    (
        {"adapt": True, "tune": True, "begin_as": {"bucket_cap_mb": 2, "bucket_caps_mb": [], "wire": []}},
        AdaptiveStrategy(begin_as=DDP, search_from=HOME, tune=True, adapt=True),
    ),
    (
        {"adapt": True, "begin_as": {"bucket_cap_mb": 2, "channels": 2}},
        AdaptiveStrategy(begin_as=SERVERS, search_from=HOME, tune=False, adapt=True),
    ),
    ({"tune": False, "adapt": False, "begin_as": None}, HOME),
]


def plan_file(strategy: dict[str, Any], model: ModelSpec, folder: Path) -> Path:
    document = Plan.data_parallel(HOME, 2, model).model_dump(mode="json", exclude_none=True)
    document["parallel"] = {"data": strategy}
    path = folder / "plan.yaml"
    path.write_text(files.dump_yaml(document))
    return path


@pytest.mark.parametrize(("options", "expected"), EARLIER)
def test_decoupled_plans_of_earlier_formats_are_adaptive_ones(
    options: dict[str, Any], expected: Strategy, tmp_path: Path
) -> None:
    model = layered_model(4)
    options = {"bucket_cap_bytes": 5000, **options}
    path = plan_file({"decoupled": options}, model, tmp_path)
    assert Plan.load(path).strategy == expected
    assert headway.strategy("decoupled", **options) == expected
    saved = tmp_path / "saved.yaml"
    Plan.load(path).save(saved)
    assert Plan.load(saved).strategy == expected


def test_a_plan_that_begins_as_stock_ddp_says_so_and_not_decoupled(tmp_path: Path) -> None:
    model = layered_model(4)
    adapting = registry.adapting(DDP)
    assert adapting == AdaptiveStrategy(begin_as=DDP, tune=False, adapt=True)
    Plan.data_parallel(adapting, 2, model).save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert "ddp:" in text
    assert "decoupled" not in text
    assert adapting.describe() == "DDP, bucket_cap_mb=2, adapting"
    assert adapting.decide(Job.of(model)) == DDP.decide(Job.of(model))


def test_without_a_plan_decoupled_schedules_are_tuned() -> None:
    strategy = registry.without_a_plan()
    assert strategy == AdaptiveStrategy(begin_as=DecoupledStrategy(), tune=True)
    assert strategy.decides_while_training


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"begin_as": {"ddp": {"wire": [{"dtype": "bfloat16"}]}}}, "must send gradients as they are"),
        ({"begin_as": {"pipeline": {}}}, "begin_as cannot be pipeline"),
        ({"begin_as": {"adaptive": {}}}, "begin_as cannot be adaptive"),
        ({"begin_as": {"no such": {}}}, "there is no strategy 'no such'"),
        ({"begin_as": {"ddp": {"no_such": 1}}}, "ddp.no_such"),
        ({"begin_as": {}}, "the name of one strategy"),
        ({"search_from": {"decoupled": {}}}, "search_from is for a job that does not begin as decoupled"),
        ({"begin_as": {"ddp": {}}, "search_from": {"ddp": {}}}, "search_from must be decoupled"),
    ],
)
def test_what_cannot_be_changed_while_training_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(headway.UserError, match=complaint):
        headway.strategy("adaptive", **options)
