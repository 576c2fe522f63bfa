"""Parameter servers: the numbers of one process, recordings that replay, and peers that die."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour.parameter_server_cases import alone, net
from torch import nn

from headway.errors import UnsupportedError
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.strategies.parameter_server.runtime import wrap
from headway.trace.folder import load_trace

CASES = "tests.behaviour.parameter_server_cases"

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_same_numbers_as_one_process(world_size: int) -> None:
    strategies: list[dict[str, Any]] = [
        {"bucket_cap_mb": cap, "channels": channels}
        for cap, channels in ((0, 1), (0.001, 2), (0.001, 3), (25, 1))
    ]
    strategies += [
        {"bucket_cap_mb": 0.001, "channels": 2, "shares": (1, 7, 90)[:world_size], "pieces": pieces}
        for pieces in (1, 3)
    ]
    results = workers.run(world_size, f"{CASES}:trained", strategies, timeout_s=110)
    for accumulate in (1, 2):
        expected = alone(world_size, accumulate)
        for number in range(len(strategies)):
            for result in results:
                for got, wanted in zip(result[f"{number} {accumulate}"], expected, strict=True):
                    assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_a_recording_says_the_strategy_and_replays(tmp_path: Path) -> None:
    workers.run(2, f"{CASES}:recorded", str(tmp_path))
    trace = load_trace(tmp_path / "trace")
    served = trace.events[0].where(trace.events[0].algorithm == "servers")
    assert set(served.group.tolist()) == {ParameterServerStrategy.name}
    replayer = Replayer(trace)
    assert replayer.recorded_strategy == ParameterServerStrategy(bucket_cap_mb=0.001)
    result = replayer.replay()
    assert result.step_ms > 0
    of_gradients = [c for c in result.graph.collectives if c.bucket >= 0]
    assert {c.selection.algorithm for c in of_gradients} == {"servers"}
    assert replayer.replay(DistributedDataParallelStrategy(), WhatIf(workers=4)).step_ms > 0


def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    for shares, order in workers.run(2, f"{CASES}:misfits"):
        assert "got 3 shares" in shares
        assert "ranks do not agree on the model's parameters" in order


def test_a_divisor_that_hooks_are_not_told_is_refused() -> None:
    for said in workers.run(2, f"{CASES}:divided_by_those_left"):
        assert ["divide_by_initial_world_size=False" in each for each in said] == [True, True]


def test_buckets_that_ddp_replaces_are_not_kept() -> None:
    for held in workers.run(2, f"{CASES}:held_after_rebuilding"):
        replaced, own = zip(*held, strict=True)
        assert replaced == (0,) * 4
        assert min(own[1:]) > 1  # DDP begins with one bucket, which it replaces
        assert len(set(own)) > 1  # DDP rebuilt its buckets


def test_a_killed_peer_ends_the_others_with_a_word() -> None:
    ended = workers.launch(3, f"{CASES}:bereft", timeout_s=90, group_timeout_s=20)
    assert [w.status for w in ended] == [3, 3, -9]
    assert all("all_reduce of bucket" in w.output for w in ended[:2])


def test_parameters_elsewhere_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="on the CPU"):
        wrap(nn.Linear(2, 2, device="meta"), ParameterServerStrategy())
    assert isinstance(net(), torch.nn.Module)
