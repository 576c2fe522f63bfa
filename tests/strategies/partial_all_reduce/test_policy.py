from __future__ import annotations

import math

import pytest
from torch import nn

from headway.cluster import Cluster, Host
from headway.errors import PlanError, UserError
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.permission import ASYNCHRONOUS
from headway.scheduling.groups import CoordinatedGroups, GroupSchedule
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy
from headway.strategies.registry import plugin_named

MODEL = ModelSpec(
    parameters=(ParameterSpec(name="w", shape=(10,), dtype="float32", module="m"),), forward_order=("m",)
)
CLUSTER = Cluster(hosts=tuple(Host(name=f"h{n}", workers=3, up_gbps=1, down_gbps=1) for n in range(2)))


def test_generators_decide_while_a_job_trains() -> None:
    strategy = PartialAllReduceStrategy(groups="first-come", group_size=3, deadline_ms=2, staleness=1, seed=4)
    decided = strategy.decide(Job.of(MODEL, 4))
    assert decided == CoordinatedGroups(4, "first-come", (("deadline_ms", 2.0), ("group_size", 3)), 1, 4)
    assert "first-come" in strategy.describe()
    assert hash(strategy) == hash(strategy.model_copy())


def test_static_groups_are_those_of_the_hosts() -> None:
    strategy = PartialAllReduceStrategy(groups="static")
    job = Job((MODEL,), 6, CLUSTER)
    decided = strategy.decide(job)
    assert isinstance(decided, GroupSchedule)
    assert decided.rounds[0] == ((0, 1, 2), (3, 4, 5))
    spelled_out = strategy.spelled_out(job)
    assert spelled_out.hosts == (3, 3)
    assert spelled_out.decide(Job.of(MODEL, 6)) == decided, "a live job knows no cluster"
    with pytest.raises(PlanError, match="do not add up"):
        spelled_out.decide(Job.of(MODEL, 4))
    assert strategy.decide(Job.of(MODEL, 1)) == GroupSchedule(1, ((),))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": "circle"}, "expected static, first-come"),
        ({"groups": "all", "group_size": 2}, "unknown key group_size"),
        ({"groups": "static", "deadline_ms": 2}, "static groups do not take deadline_ms"),
        ({"groups": "random", "hosts": (2, 2)}, "hosts requires static groups"),
        ({"staleness": 2}, "staleness"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PartialAllReduceStrategy.model_validate(options)


def test_it_proposes_a_handful_for_whoever_permits_it_and_says_what_each_changes() -> None:
    plugin = plugin_named("partial-all-reduce")
    proposed = plugin.propose(Job((MODEL,), 6, CLUSTER))
    assert 5 <= len(proposed.strategies) <= 12
    assert math.isinf(proposed.bound_ms)
    for strategy in proposed.strategies:
        assert isinstance(strategy, PartialAllReduceStrategy)
        assert strategy.changes_training
        assert ("late" in strategy.changes_training) == bool(strategy.staleness)
        assert ("two runs differ" in strategy.changes_training) == (not strategy.is_static)
    many = Cluster(hosts=tuple(host_of(number) for number in range(300)))
    left_out = plugin.propose(Job((MODEL,), 300, many))
    assert left_out.strategies == ()
    assert left_out.about_permitted == ASYNCHRONOUS
    assert "300 ranks" in left_out.note
    refused = plugin.propose(Job((MODEL,), 6, CLUSTER, refusals={plugin.name: "it has SyncBatchNorm"}))
    assert refused.strategies == ()
    assert "SyncBatchNorm" in refused.note


def host_of(number: int) -> Host:
    return Host(name=f"host{number}", workers=1, up_gbps=1, down_gbps=1)


def test_it_trains_in_a_process_group_alone() -> None:
    with pytest.raises(UserError, match="no process group"):
        plugin_named("partial-all-reduce").wrap(nn.Linear(1, 1), PartialAllReduceStrategy())
