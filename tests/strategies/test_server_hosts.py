"""Plans with servers on hosts: replayed from a recording, never proposed, and refused live."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from tests.replayer.test_replayer import as_bucketed, cluster_of, job
from tests.synthetic import synthetic_trace
from torch import nn

from headway.collectives.algorithms import ALL_REDUCE, SERVERS
from headway.collectives.selection import Selection
from headway.errors import PlanError, UnsupportedError
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.strategies.adaptive.policy import AdaptiveStrategy
from headway.strategies.parameter_server import runtime
from headway.strategies.parameter_server.policy import ParameterServerStrategy

SERVED = ParameterServerStrategy(servers=4, bucket_cap_mb=0.25)


def test_a_recording_is_replayed_with_servers_on_hosts_of_their_own() -> None:
    one = job(world_size=4, gbps=0.5)
    replayer = Replayer(as_bucketed(synthetic_trace(one)), cluster_of(one))
    without, with_four = (
        replayer.replay(SERVED.model_copy(update={"servers": servers})).step_ms for servers in (0, 4)
    )
    assert with_four < 0.9 * without
    halved = replayer.replay(SERVED, WhatIf.parse(["bandwidth=0.5x"]))
    assert halved.step_ms > 1.2 * with_four, "the servers' links too"
    assert len(halved.graph.cluster.server_hosts) == 4


def test_such_plans_are_refused_live() -> None:
    with pytest.raises(UnsupportedError, match="predicted and cannot be run yet"):
        runtime.wrap(nn.Linear(2, 2), SERVED)
    with pytest.raises(ValidationError, match="can be predicted, not run"):
        AdaptiveStrategy(adapt=True, begin_as=SERVED)
    with pytest.raises(PlanError, match="can only be predicted"):
        _ = Selection(SERVERS, ALL_REDUCE, server_hosts=2).program_of


def test_a_plan_says_where_its_servers_are() -> None:
    assert SERVED.describe() == (
        "parameter servers on the workers' hosts and 4 hosts more, keys of 0.25 MiB, 2 channels"
    )
