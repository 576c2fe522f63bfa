"""Private names of DistributedDataParallel and fully_shard."""

from __future__ import annotations

import copyreg
import inspect
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel


def ddp_bucket_assignment(
    shapes: Sequence[tuple[tuple[int, ...], str]], limits_bytes: list[int]
) -> list[list[int]]:
    """How DDP would assign tensors of these shapes and dtypes, in this order, to buckets of ``limits_bytes``."""
    if not shapes:
        return []
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape, dtype in shapes]
    assigned, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        tensors, limits_bytes, [False] * len(tensors), list(range(len(tensors)))
    )
    return [list(group) for group in assigned]


def ddp_buckets(ddp: DistributedDataParallel) -> list[list[int]]:
    """DDP's current buckets, as indices into its parameters that require gradients; empty if unknown."""
    text = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [[int(index) for index in bucket.split()] for bucket in str(text).split(",") if bucket.strip()]


def stock_ddp(
    earlier: DistributedDataParallel | None,
    module: torch.nn.Module,
    options: Mapping[str, Any],
    accumulated: Collection[int] = (),
) -> DistributedDataParallel:
    """Construct torch's own DistributedDataParallel over ``module``, even where Headway replaces the class for scripts.

    ``earlier``, if given, is constructed again in place; its reducer must have been released. ``accumulated`` are ids
    of parameters with gradients from a backward under ``no_sync``: they are reduced together with the next backward's.
    """
    ddp: DistributedDataParallel = object.__new__(DistributedDataParallel) if earlier is None else earlier
    # Patches of the constructor set ``__wrapped__``.
    inspect.unwrap(DistributedDataParallel.__init__)(ddp, module, **options)
    if ddp.find_unused_parameters:
        for index, parameter in enumerate(ddp._build_params_for_reducer()[0]):
            if id(parameter) in accumulated:
                ddp.reducer._autograd_hook(index)  # type: ignore[attr-defined]
    return ddp


def copy_without_hook(ddp: DistributedDataParallel, *added: str) -> None:
    """Make copies and pickles of ``ddp`` ordinary DDPs.

    They omit its communication hook, whose state cannot be copied, and the attributes ``added`` to it.
    """
    reference = weakref.ref(ddp)

    def state() -> dict[str, Any]:
        copied = reference()
        assert copied is not None
        kind: Any = type(copied)
        values: dict[str, Any] = kind.__getstate__(copied)
        values["_comm_hooks"] = []
        return {name: value for name, value in values.items() if name not in (*added, "__getstate__")}

    ddp.__dict__["__getstate__"] = state


def copy_with_hook(ddp: DistributedDataParallel) -> None:
    """Undo ``copy_without_hook``."""
    del ddp.__dict__["__getstate__"]


def pickle_as_stock_ddp(wrapper: DistributedDataParallel) -> tuple[Any, ...]:
    """The result of ``__reduce_ex__`` for a class that replaces DDP, so that copies and pickles are ordinary DDPs.

    As with torch's own, no other rank is needed. Raises RuntimeError if the process group is not the default one.
    """
    options = {
        "init_sync": False, "process_group": wrapper.process_group, "device_ids": wrapper.device_ids,
        "find_unused_parameters": wrapper.find_unused_parameters,
    }  # fmt: skip
    plain = stock_ddp(None, wrapper.module, options)
    state: Any = plain.__getstate__()
    release_reducer(plain)
    state["training"] = wrapper.training
    return copyreg._reconstructor, (DistributedDataParallel, object, None), state  # type: ignore[attr-defined]


def divides_by_remaining_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether a ``join()`` is active in which gradients are divided by the number of ranks that still train."""
    return bool(ddp._join_config.enable) and not getattr(ddp, "_divide_by_initial_world_size", True)


def rebuild_buckets(ddp: DistributedDataParallel) -> bool:
    """Rebuild the buckets of ``ddp`` in the order of its first backward, on every rank.

    Returns False if that backward has not ended.
    """
    reducer: Any = ddp.reducer
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    ddp._has_rebuilt_buckets = reducer._rebuild_buckets()
    return bool(ddp._has_rebuilt_buckets)


def check_reduced(ddp: DistributedDataParallel) -> None:
    """Raise torch's RuntimeError if a backward is in progress, or has left parameters unreduced."""
    held: Any = ddp
    held.reducer._check_reducer_finalized()


def release_reducer(ddp: DistributedDataParallel) -> None:
    """Remove the hooks of ``ddp`` and free its buckets, between two backwards; ``stock_ddp`` restores them.

    Raises torch's RuntimeError if the last backward has not been reduced.
    """
    check_reduced(ddp)
    held: Any = ddp
    held.reducer._remove_autograd_hooks()
    held.reducer = held.logger = None
    held._comm_hooks.clear()  # and with them their states


def ddp_has_separate_bucket_cap(ddp: DistributedDataParallel) -> bool:
    """Whether this torch has separate caps for buckets, and for splitting compiled graphs."""
    return hasattr(ddp, "_bucket_config")


def ddp_bucket_cap_mb(ddp: DistributedDataParallel) -> float | None:
    """The ``bucket_cap_mb`` that a DDP was built with; None if it is the default."""
    if getattr(ddp, "bucket_bytes_cap_default", False):
        return None
    config = getattr(
        ddp, "_bucket_config", ddp
    )  # ``compile_in_parts_of`` may have set the attribute of ``ddp``
    return float(config.bucket_bytes_cap) / 2**20


def ddp_bucket_caps_mb(ddp: torch.nn.parallel.DistributedDataParallel) -> list[float]:
    """The ``bucket_cap_mb_list`` that a DDP was built with, in MiB; empty if it has none, or before torch 2.13."""
    return [cap_bytes / 2**20 for cap_bytes in getattr(ddp, "bucket_bytes_cap_list", None) or ()]


def move_inputs_like_ddp(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the tensors in a forward's arguments to ``device``, as DDP does if it has ``device_ids``."""
    moved_inputs, moved_kwargs = _to_kwargs(inputs, kwargs, device, True)
    if not moved_inputs:
        return (), {}
    return moved_inputs[0], moved_kwargs[0]


def join_config_disabled() -> Any:
    """The join configuration that a joinable module has outside ``join()``."""
    return _JoinConfig.construct_disabled_join_config()


def sharded_by_fully_shard() -> type | None:
    """The base class of modules sharded by ``fully_shard``; None if none was sharded in this process."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded: type | None = getattr(fsdp, "FSDPModule", None)
    return sharded if sharded is not None and sharded.__subclasses__() else None


def ddp_ignores_parameters(module: torch.nn.Module) -> bool:
    """Whether DistributedDataParallel was told to leave some parameters or buffers of ``module`` alone."""
    return bool(getattr(module, "_ddp_params_and_buffers_to_ignore", None))
