"""Private names of torch.compile: which modules run compiled, and how DDP's buckets split compiled graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class CompiledForward:
    """A mixin for classes of modules whose forward runs compiled, but whose own hooks run outside compiled code."""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of ``module`` itself run through torch.compile."""
    _, call, forward = compilation_marks(module)
    if call is not None or hasattr(forward, "_torchdynamo_orig_callable"):
        return True
    return has_compiled_forward(module)


def compilation_marks(module: torch.nn.Module) -> tuple[type, Any, Any]:
    """The attributes that change when ``module`` is compiled in place."""
    attributes = module.__dict__
    return type(module), attributes.get("_compiled_call_impl"), attributes.get("forward")


@contextmanager
def compiled_in_parts(cap_bytes: int) -> Iterator[None]:
    """Inside it, code is compiled as under a DDP with buckets of ``cap_bytes``: split into one graph per bucket.

    A graph's gradients all become ready at the end of its backward, so communication can only begin between graphs.
    """
    wrapper: Any = DistributedDataParallel
    before = wrapper._active_ddp_module
    wrapper._active_ddp_module = SimpleNamespace(bucket_bytes_cap=_least_part_bytes(cap_bytes))
    try:
        yield
    finally:
        wrapper._active_ddp_module = before


def compile_in_parts_of(ddp: DistributedDataParallel, cap_bytes: int) -> None:
    """Have the module inside ``ddp`` compiled in parts of ``cap_bytes``. Its buckets exist already and stay as is."""
    ddp.bucket_bytes_cap = _least_part_bytes(cap_bytes)


def _least_part_bytes(cap_bytes: int) -> int:
    """Raise ``cap_bytes`` to at least the size of DDP's first bucket: with a smaller cap, compiling fails."""
    least_bytes: int = cast(Any, dist)._DEFAULT_FIRST_BUCKET_BYTES
    return max(cap_bytes, least_bytes)


def has_compiled_forward(module: torch.nn.Module) -> bool:
    """Whether ``module``'s forward runs compiled, but its hooks outside, as in the result of torch.compile."""
    return isinstance(module, CompiledForward) or _is_compiled_copy(module)


def _is_compiled_copy(module: Any) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def compiled_from(module: Any) -> Any:
    """The original of a module returned by torch.compile; any other ``module`` itself."""
    return module._orig_mod if _is_compiled_copy(module) else module


def eager_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of ``root`` whose own hooks run outside of compiled code."""
    if is_compiled(root):
        return [root] if has_compiled_forward(root) else []
    eager = {id(root): root}
    for child in root.children():
        eager |= {id(module): module for module in eager_modules(child)}
    return list(eager.values())


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"] or utils.counters["stats"])
