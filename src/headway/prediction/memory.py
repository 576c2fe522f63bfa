"""Measures the memory of one forward and backward, on real or fake tensors.

Fake tensors have shapes but no data. Unlike tensors on the meta device, they select the kernels of the device that they
imitate, so attention keeps what its fused kernel keeps.
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
    """Build the module of ``make`` on fake tensors, for a batch of ``samples``. Raises UserError as ``Built`` does."""
    return Built(text, make, torch_private.fake_tensors(), samples)


def pass_memory_of(built: Built) -> PassMemory | None:
    """Measure the memory of one forward and backward of ``built``. Raises UserError if they fail."""
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
        memory = watch.end()
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
    return memory
