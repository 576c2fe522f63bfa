"""What operators hold while they run and no tensor shows: on the CPU, what convolutions have in an order of their own.

oneDNN convolves blocks of channels. Tensors that are not in that order are copied into it, and the result out of it
again; meanwhile there is twice of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headway import torch_private

_aten = torch.ops.aten
FORWARD, BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_BATCH = 16  # from which oneDNN convolves kernels of one element on one thread too
_INPUT_NUMEL = 20_480  # from which it convolves a single sample


def inner_bytes(operator: Any, arguments: Any, out: Any) -> int:
    """What ``operator``, called with ``arguments`` and returning ``out``, held in addition to these; 0 where unknown.

    Fake tensors stand for those of any device, and hold nothing.
    """
    if operator is FORWARD:
        given, weight, _bias, *options = arguments
        put_out = out
    elif operator is BACKWARD:
        put_out, given, weight, _bias_sizes, *options = arguments
    else:
        return 0
    if not _is_on_cpu(given) or not _is_by_onednn(given, weight, *options[:6]):
        return 0
    copies = _copied_bytes(given), _copied_bytes(put_out)
    # Forward lets go of its copy of what it was given before it copies its result; backward needs both at a time.
    return max(copies) if operator is FORWARD else sum(copies)


def _is_on_cpu(given: torch.Tensor) -> bool:
    plain = given.device.type == "cpu" and given.dtype == torch.float32
    return plain and not torch_private.is_fake(given)


def _is_by_onednn(
    given: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    _padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether PyTorch has oneDNN convolve, as ``use_mkldnn`` in its Convolution.cpp decides."""
    if transposed or not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    kernel = weight.shape[-2:]
    spread = any(step != 1 for step in (*stride, *dilation))
    threads = torch.get_num_threads() > 1
    worth = spread or threads or given.shape[0] >= _BATCH or any(extent != 1 for extent in kernel)
    large = all(extent > 3 for extent in kernel) or given.numel() > _INPUT_NUMEL
    return worth and (groups > 1 or given.shape[0] > 1 or large)


def _copied_bytes(tensor: torch.Tensor) -> int:
    """Channels that come last are convolved as they are."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = last is not None and tensor.is_contiguous(memory_format=last)
    return 0 if is_last else tensor.numel() * tensor.element_size()
