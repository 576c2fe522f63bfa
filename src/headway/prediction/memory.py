"""What a pass of a module holds in memory: watched while it computes, on real tensors or on fake ones.

Fake tensors have shapes and no data, and unlike those of the meta device take the kernels of the device they claim to
be on. So attention keeps what its fused kernel keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from headway import torch_private
from headway.memory.pass_watch import PassMemoryWatch
from headway.model import PassMemory
from headway.prediction.function import Built


def on_fake_tensors(text: str, make: Callable[..., Any], samples: int | None = None) -> Built:
    """What ``make`` builds, of tensors without data, for ``samples``. Raises UserError as ``Built`` does."""
    return Built(text, make, torch_private.fake_tensors(), samples)


def pass_memory_of(built: Built) -> PassMemory | None:
    """What one forward and backward of ``built`` hold. Raises UserError where they fail."""
    module = built.module
    module.zero_grad(set_to_none=True)
    watch = PassMemoryWatch()
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(watch.gradient_done, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        built.backward(watch.begin, watch.forward_done)
        watch.update_begins()
    finally:
        found = watch.end()
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
    return found
