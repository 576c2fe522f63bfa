"""Stock DistributedDataParallel with the bucket size of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.ddp import wire
from headway.strategies.ddp.policy import DistributedDataParallelStrategy, cap_bytes
from headway.strategies.plugin import InForce


def takes_a_cap_a_bucket() -> bool:
    """Whether this torch takes a cap for every bucket."""
    return "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters


def options(strategy: DistributedDataParallelStrategy) -> dict[str, Any]:
    """The arguments of DistributedDataParallel that ``strategy`` decides, torch's defaults among them.

    They are all there, so that a script's own bucket sizes never stay in force under a plan: None is torch's default.
    Raises UnsupportedError where this torch does not take a cap for every bucket and the strategy has them.
    """
    decided: dict[str, Any] = {"bucket_cap_mb": strategy.bucket_cap_mb}
    if takes_a_cap_a_bucket():
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


def keep_compiled_parts(wrapped: DistributedDataParallel, given: Mapping[str, Any]) -> None:
    """Have a model compiled in the parts that the script's own options, ``given``, ask for, whenever it is.

    Scripts compile before they wrap, or what they have wrapped. Then gradients are there when they were as the job was
    recorded; and caps below a MiB, which compiling does not take, are for buckets alone.
    """
    compiled = any(torch_private.is_compiled(module) for module in wrapped.module.modules())
    if compiled or torch_private.ddp_has_separate_bucket_cap(wrapped):
        torch_private.compile_in_parts_of(wrapped, cap_bytes(given.get("bucket_cap_mb")))


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


def named_buckets(wrapped: DistributedDataParallel) -> tuple[tuple[str, ...], ...]:
    """The buckets that DDP has now, by the names of their parameters."""
    names = [name for name, p in wrapped.module.named_parameters() if p.requires_grad]
    return tuple(tuple(names[i] for i in bucket) for bucket in torch_private.ddp_buckets(wrapped))
