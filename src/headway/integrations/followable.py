"""Which plans an unmodified script can follow; needs no torch, so that a launcher refuses before it starts anything."""

from __future__ import annotations

from headway.errors import UnsupportedError
from headway.plan import Plan
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.data_parallel.parameter_server.policy import ParameterServerStrategy


def check_followable(plan: Plan) -> None:
    """Raise UnsupportedError for a strategy that can only be had with ``headway.parallelize``."""
    if not isinstance(
        plan.strategy, DistributedDataParallelStrategy | DecoupledStrategy | ParameterServerStrategy
    ):
        raise UnsupportedError(
            "an unmodified script cannot follow this plan's strategy", got=plan.strategy.name,
            fix="Call headway.parallelize in the script.",
        )  # fmt: skip
