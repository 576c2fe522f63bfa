"""What a plan says is what runs: through ``parallelize`` and in scripts that know nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import workers
from torch import nn

from headway.errors import UserError
from headway.integrations.parallelize import parallelize
from headway.plan import Plan
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.live.module_spec import model_spec


@pytest.mark.processes
def test_parallelize() -> None:
    results = workers.run(2, "tests.behaviour.plan_cases:in_code")
    assert results[0] == results[1]
    ddp, decoupled = results[0]["ddp"], results[0]["decoupled"]
    assert ddp["class"] == "DistributedDataParallel"
    assert ddp["cap_bytes"] == 3 * 2**20
    assert decoupled["class"] == "DecoupledDataParallel"
    assert decoupled["buckets"] == [["2.bias", "0.weight"], ["2.weight", "0.bias"]]
    assert decoupled["sums"] == pytest.approx(ddp["sums"], rel=1e-12)
    assert results[0]["unrefused"] == {}


@pytest.mark.processes
def test_a_model_that_is_the_plans_on_some_ranks_alone_is_refused() -> None:
    for found in workers.run(2, "tests.behaviour.plan_cases:in_another_order"):
        assert set(found) == {"decoupled", "ddp", "parameter_server"}, found
        assert all("ranks do not agree on the model's parameters" in said for said in found.values()), found


@pytest.mark.processes
def test_an_unmodified_script_follows_the_plan(tmp_path: Path) -> None:
    results = workers.run(2, "tests.behaviour.plan_cases:injected", str(tmp_path))
    assert results[0] == results[1]
    result = results[0]
    assert result["sums"] == pytest.approx(result["stock sums"], rel=1e-12)
    assert result["names"] == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]
    assert result["buckets"] == [["2.bias", "0.weight"], ["2.weight", "0.bias"]]
    assert "another model" in result["other model"]
    assert "subclass" in result["subclass"]
    assert "cannot be compiled as a whole" in result["compiled around"]


@pytest.mark.processes
def test_a_model_that_is_not_the_plans_stays_stock() -> None:
    first, second = workers.launch(2, "tests.behaviour.plan_cases:two_models")
    for worker in (first, second):
        assert worker.status == 0, worker.output
        assert worker.result["planned"] == pytest.approx(worker.result["stock"], rel=1e-12)
    assert "Linear (24 B) stays with stock" in first.output
    assert "stays with stock" not in second.output


@pytest.mark.processes
def test_buckets_are_sent_as_the_plan_says() -> None:
    for result in workers.run(2, "tests.behaviour.plan_cases:sent_as"):
        assert result["wire"] == [None, {"codec": "cast", "dtype": "bfloat16", "error_feedback": False}]
        assert 0 < result["rounded"] < 4
        assert result["buckets"] > 1


def test_no_process_group() -> None:
    model = nn.Linear(2, 2)
    plan = Plan.data_parallel(DecoupledStrategy(), 2, model_spec(model))
    with pytest.raises(UserError, match="init_process_group"):
        parallelize(model, torch.optim.SGD(model.parameters()), plan)
