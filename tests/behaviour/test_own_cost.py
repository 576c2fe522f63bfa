"""What the decoupled runtime costs the main thread: measured inside a job, which goes on as if nothing had been."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from tests import workers
from torch import nn

from headway.strategies.decoupled.own_cost import own_cost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def measured(rank: int, _world_size: int) -> dict[str, object]:
    interval_s = sys.getswitchinterval()
    cost = own_cost()
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(rank))).sum().backward()
    dist.barrier()
    return {
        "cost_us": list(cost),
        "as before": sys.getswitchinterval() == interval_s,
        "gradient": model.module.weight.grad.tolist(),
    }


def test_the_main_thread_s_cost_is_measured_and_nothing_stays_behind() -> None:
    for result in workers.run(2, "tests.behaviour.test_own_cost:measured", timeout_s=120):
        assert all(0 <= us < 1e5 for us in result["cost_us"])
        assert result["cost_us"][-1] > 0
        assert result["as before"]
        assert result["gradient"] == [[0.5, 0.5]]
