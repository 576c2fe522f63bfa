"""Jobs other than one wrapped model: several of them, or one that is sharded without a wrapper."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from torch import nn

from headway import torch_private

SHARDED = (
    "The model is sharded with fully_shard (FSDP2): all-gathers of parameters and reduce-scatters of gradients are its "
    "communication. Its modules are not seen, and no plan is made for it."
)


def several_models(others: Sequence[str]) -> str:
    """What to say of models that were wrapped besides the one that is recorded."""
    return (
        f"{1 + len(others)} models were wrapped: modules and gradients are those of the one with the most bytes. Only "
        f"communication and updates of {', '.join(others)} are recorded, and no plan is made for the job."
    )


def sharded_root() -> nn.Module | None:
    """The largest module that ``fully_shard`` was called on in this process, if there is one."""
    kind = torch_private.sharded_by_fully_shard()
    if kind is None:
        return None
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return max(found, key=lambda module: sum(1 for _ in module.modules()), default=None)
