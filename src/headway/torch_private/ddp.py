"""What DistributedDataParallel and fully_shard keep to themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _to_kwargs


def ddp_bucket_assignment(
    shapes: Sequence[tuple[tuple[int, ...], str]], limits_bytes: list[int]
) -> list[list[int]]:
    """Ask DDP's own bucketing how it would group tensors of these shapes and dtypes, in this order."""
    if not shapes:
        return []
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in shapes]
    assigned, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        tensors, limits_bytes, [False] * len(tensors), list(range(len(tensors)))
    )
    return [list(group) for group in assigned]


def ddp_buckets(ddp: torch.nn.parallel.DistributedDataParallel) -> list[list[int]]:
    """DDP's buckets in force, as positions among its parameters that take gradients; empty where unknown."""
    text = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(index) for index in bucket.split()] for bucket in str(text).split(",") if bucket.strip()]


def ddp_bucket_cap_mb(ddp: torch.nn.parallel.DistributedDataParallel) -> float | None:
    """The ``bucket_cap_mb`` a DDP was built with; None where the default is in force."""
    if getattr(ddp, "bucket_bytes_cap_default", False):
        return None
    config = getattr(ddp, "_bucket_config", ddp)  # the attribute may be what ``compile_in_parts_of`` says
    return float(config.bucket_bytes_cap) / 2**20


def moved_as_ddp_does(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward with their tensors on ``device``, as DDP moves them where it has ``device_ids``."""
    moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, True)
    if not moved_inputs:
        return (), {}
    return moved_inputs[0], moved_kwargs[0]


def join_config_disabled() -> Any:
    """What a module that can be joined carries outside of ``join()``."""
    return _JoinConfig.construct_disabled_join_config()


def sharded_by_fully_shard() -> type | None:
    """The class of modules that ``fully_shard`` was called on, where it has been in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: type | None = getattr(fsdp, "FSDPModule", None)
    return sharded if sharded is not None and sharded.__subclasses__() else None


def ddp_ignores_some_of(module: torch.nn.Module) -> bool:
    """Whether DistributedDataParallel was told to leave some parameters or buffers of ``module`` alone."""
    return bool(getattr(module, "_ddp_params_and_buffers_to_ignore", None))
