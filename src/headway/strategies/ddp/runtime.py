"""Stock DistributedDataParallel with the bucket size of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.strategies.ddp import wire
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.live.stock import bucket_options, keep_compiled_parts, named_buckets
from headway.strategies.plugin import InForce


def options(strategy: DistributedDataParallelStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides. Raises as ``bucket_options``."""
    return bucket_options(strategy.bucket_cap_mb, strategy.bucket_caps_mb)


def wrap(
    module: nn.Module, strategy: DistributedDataParallelStrategy, **ddp_options: Any
) -> DistributedDataParallel:
    """Wrap ``module`` in stock DDP; what ``strategy`` decides goes before the same option in ``ddp_options``.

    Raises UnsupportedError where its gradients cannot be sent as ``strategy`` says.
    """
    wire.check(module, strategy)
    wrapped = DistributedDataParallel(module, **{**ddp_options, **options(strategy)})
    take_over(wrapped, strategy, ddp_options)
    return wrapped


def take_over(
    wrapped: DistributedDataParallel, strategy: DistributedDataParallelStrategy, given: Mapping[str, Any]
) -> None:
    """Do what ``strategy`` decides besides ``options``, for a model that a script has just wrapped with ``given``."""
    keep_compiled_parts(wrapped, given)
    if strategy.wire:
        wire.install(wrapped, strategy)


def in_force(wrapped: nn.Module) -> InForce | None:
    """What DDP does for a model that it wraps."""
    if not isinstance(wrapped, DistributedDataParallel):
        return None
    caps_mb = torch_private.ddp_bucket_caps_mb(wrapped)
    in_force: dict[str, Any] = (
        {"bucket_caps_mb": caps_mb}
        if caps_mb
        else {"bucket_cap_mb": torch_private.ddp_bucket_cap_mb(wrapped)}
    )
    if (sent_as := wire.installed(wrapped)) is not None:
        in_force["wire"] = sent_as
    return InForce(in_force, named_buckets(wrapped))
