"""Stock DistributedDataParallel with the bucket size of a plan."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import UnsupportedError
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy


def options(strategy: DistributedDataParallelStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides, torch's defaults among them.

    They are all there, so that a script's own bucket sizes never stay in force beside a plan: None is torch's default.
    Raises UnsupportedError where this torch does not take a cap for every bucket and the strategy has them.
    """
    decided: dict[str, Any] = {"bucket_cap_mb": strategy.bucket_cap_mb}
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters:
        decided["bucket_cap_mb_list"] = list(strategy.bucket_caps_mb) or None
    elif strategy.bucket_caps_mb:
        raise UnsupportedError(
            "this torch cannot give every bucket a size of its own", got=torch.__version__,
            expected="a DistributedDataParallel that takes bucket_cap_mb_list", fix="Use torch 2.13 or newer.",
        )  # fmt: skip
    return decided


def wrap(
    module: nn.Module, strategy: DistributedDataParallelStrategy, **ddp_options: Any
) -> DistributedDataParallel:
    """Wrap ``module`` in stock DDP; what ``strategy`` decides goes before the same option in ``ddp_options``."""
    return DistributedDataParallel(module, **{**ddp_options, **options(strategy)})
