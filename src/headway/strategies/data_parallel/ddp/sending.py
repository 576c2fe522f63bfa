"""Sending one bucket as a codec says: what comes before and behind the codec itself, whoever exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headway.compression.codec import Codec, Gradients, Reduced, Sent, Shape, computed_in
from headway.strategies.data_parallel.channels.communication import own_work

Exchanging = Callable[[Sent], torch.Tensor]
"""Carries out one collective; raises where a peer fails."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A bucket on its way: its gradients, flat, and what is ``kept`` of earlier ones, None without error feedback.

    ``shapes`` and ``keys`` are those of its parameters. With ``some_unused``, those whose gradients are all zeros may
    have none: DDP drops what it gets for a parameter that no rank has used.
    """

    buffer: torch.Tensor
    kept: torch.Tensor | None
    shapes: Sequence[Shape]
    keys: Sequence[int]
    some_unused: bool = False


def send(
    codec: Codec,
    bucket: Outgoing,
    exchange: Exchanging,
    memory: dict[int, torch.Tensor],
    rank: int,
    world_size: int,
) -> bool:
    """Put the mean over ranks, as far as ``codec`` sends it, in the place of the bucket's gradients.

    Returns whether it is finite. Where it is not, as in a step that a GradScaler skips, what is kept and remembered is
    worth nothing.
    """
    buffer, kept = bucket.buffer, bucket.kept
    with own_work():
        full = buffer.to(computed_type(buffer)) if kept is None else kept.add_(buffer)
        held = _held_back(bucket, full) if kept is not None and bucket.some_unused else None
        flat = full if held is None else full - held
        reduction = codec.reduce(Gradients(flat, bucket.shapes, bucket.keys, rank, world_size, memory))
        sent = next(reduction)
    while True:
        result = exchange(sent)
        with own_work():
            try:
                sent = reduction.send(result)
            except StopIteration as stop:
                return _taken_over(bucket, stop.value, held)


def computed_type(gradients: torch.Tensor) -> torch.dtype:
    """The type in which codecs compute on these."""
    found: torch.dtype = getattr(torch, computed_in(str(gradients.dtype).removeprefix("torch.")))
    return found


def _held_back(bucket: Outgoing, full: torch.Tensor) -> torch.Tensor | None:
    """What is kept of parameters without a gradient, which waits for the next one."""
    numels = [torch.Size(shape).numel() for shape in bucket.shapes]
    unused = [not bool(part.any()) for part in bucket.buffer.split(numels)]
    if not any(unused):
        return None
    held = torch.zeros_like(full)
    for own, part, without in zip(held.split(numels), full.split(numels), unused, strict=True):
        if without:
            own.copy_(part)
    return held


def _taken_over(bucket: Outgoing, reduced: Reduced, held: torch.Tensor | None) -> bool:
    bucket.buffer.copy_(reduced.mean)
    if bucket.kept is not None:
        bucket.kept.copy_(reduced.kept)
        if held is not None:
            bucket.kept.add_(held)
    return bool(reduced.mean.sum().isfinite())
