"""Stock DistributedDataParallel with the bucket size of a plan."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy


def options(strategy: DistributedDataParallelStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides."""
    return {} if strategy.bucket_cap_mb is None else {"bucket_cap_mb": strategy.bucket_cap_mb}


def wrap(
    module: nn.Module, strategy: DistributedDataParallelStrategy, **ddp_options: Any
) -> DistributedDataParallel:
    """Wrap ``module`` in stock DDP; what ``strategy`` decides goes before the same option in ``ddp_options``."""
    return DistributedDataParallel(module, **{**ddp_options, **options(strategy)})
