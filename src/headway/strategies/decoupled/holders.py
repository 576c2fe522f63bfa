"""Who else holds a gradient or a parameter's memory, and so can read it behind our back: counted, and compared."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn

from headway import torch_private


def gradient_holders(parameter: nn.Parameter) -> tuple[int, int]:
    """Count who holds ``parameter.grad``: references to the tensor, and uses of its storage.

    Compare with ``unshared``, the counts where only the parameter does.
    """
    gradient = parameter.grad
    return sys.getrefcount(gradient), torch_private.storage_uses(gradient)  # type: ignore[arg-type]


@lru_cache
def unshared(device: torch.device) -> tuple[tuple[int, int], int]:
    """What ``gradient_holders`` counts, and the uses of a parameter's storage, where nobody shares anything.

    The interpreter and torch add their own.
    """
    counts: list[Any] = []
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.register_post_accumulate_grad_hook(lambda p: counts.append(gradient_holders(cast(Any, p))))
    with torch_private.without_user_modes(), torch.enable_grad():
        (parameter * 2).sum().backward()
    return counts[0], torch_private.storage_uses(parameter)
