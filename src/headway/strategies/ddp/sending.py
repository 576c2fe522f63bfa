"""Sending one bucket as a codec says: what comes before and behind the codec itself, whoever exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from headway.compression.codec import Codec, Gradients, Reduced, Sent, Shape, computed_in
from headway.plugins import PluginFaultError, asking
from headway.strategies.live.channels.communication import own_work

KINDS = (ALL_REDUCE, ALL_GATHER, ALL_TO_ALL)

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
    worth nothing. Raises PluginFaultError where another package's codec fails, or gives what is no mean of these.
    """
    buffer, kept = bucket.buffer, bucket.kept
    with own_work():
        full = buffer.to(computed_type(buffer)) if kept is None else kept.add_(buffer)
        held = _held_back(bucket, full) if kept is not None and bucket.some_unused else None
        flat = full if held is None else full - held
        with asking("codec", codec):
            reduction = codec.reduce(Gradients(flat, bucket.shapes, bucket.keys, rank, world_size, memory))
            sent = next(reduction)
    while True:
        _check_sent(codec, sent)
        result = exchange(sent)
        with own_work(), asking("codec", codec):
            try:
                sent = reduction.send(result)
            except StopIteration as stop:
                _check_reduced(codec, stop.value, buffer, feeds_back=kept is not None)
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


def _check_sent(codec: Codec, sent: object) -> None:
    if not isinstance(sent, Sent):
        raise PluginFaultError("codec", codec, f"reduce() yielded {type(sent).__name__}, expected Sent")
    if sent.kind not in KINDS:
        expected = " or ".join(KINDS)
        raise PluginFaultError("codec", codec, f"reduce() sent {sent.kind!r}, expected {expected}")


def _check_reduced(codec: Codec, reduced: object, gradients: torch.Tensor, *, feeds_back: bool) -> None:
    """Raise PluginFaultError where ``reduced`` cannot take the place of the flat ``gradients``."""
    if not isinstance(reduced, Reduced):
        raise PluginFaultError(
            "codec", codec, f"reduce() returned {type(reduced).__name__}, expected Reduced"
        )
    given = {"the mean": reduced.mean, "what is kept": reduced.kept}
    for what, tensor in list(given.items())[: 2 if feeds_back else 1]:
        if not isinstance(tensor, torch.Tensor) or tensor.shape != gradients.shape:
            shape: tuple[int, ...] = tuple(getattr(tensor, "shape", ()))
            got = f"{shape[0]} elements" if len(shape) == 1 else f"the shape {shape}"
            raise PluginFaultError("codec", codec, f"{what} has {got}, expected {gradients.numel()}")


def _taken_over(bucket: Outgoing, reduced: Reduced, held: torch.Tensor | None) -> bool:
    bucket.buffer.copy_(reduced.mean)
    if bucket.kept is not None:
        bucket.kept.copy_(reduced.kept)
        if held is not None:
            bucket.kept.add_(held)
    return bool(reduced.mean.sum().isfinite())
