"""The strategies there are: one line each."""

from __future__ import annotations

from headway.strategies.base import Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.parameter_server.policy import ParameterServerStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        DistributedDataParallelStrategy,
        DecoupledStrategy,
        ParameterServerStrategy,
    )
}
