"""Reduced gradients where they are sharded: brought together for who looks, and changed where they are.

To change them each rank changes its shards, and a few numbers are exchanged. A rank may have looked at its gradients
before, alone: it then holds them whole as well, and changes both.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from headway import torch_private
from headway.strategies.data_parallel.channels.observer import observer
from headway.strategies.data_parallel.decoupled import clipping
from headway.strategies.data_parallel.decoupled.bucket import LiveBucket
from headway.strategies.data_parallel.decoupled.copying import flat_copy
from headway.strategies.data_parallel.decoupled.engine import Engine
from headway.strategies.data_parallel.decoupled.messages import Answer, Limits, Reply
from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState, Replaced
from headway.strategies.data_parallel.decoupled.shard import Piece, Shard, reader


class ShardedGradients:
    """The reduced gradients of one engine.

    Every rank calls ``clip`` and ``unscale`` at the same point, with the same slots; ``bring`` is each one's affair.
    """

    def __init__(
        self, engine: Engine, shards: Sequence[Shard], pieces: Mapping[ParameterState, Sequence[Piece]]
    ) -> None:
        self._engine = engine
        self._shards = shards
        self._pieces = pieces

    def bring(self) -> None:
        """Get the other ranks' shards of every reduced gradient, and write averages into ``.grad``."""
        engine = self._engine
        slots = [slot for slot in engine.slots if slot.to_bring]
        if not slots:
            return
        self._await(slots)
        buckets = _buckets_of(slots)
        wanted = [[b.index, b.reductions, self._shards[b.index].changes] for b in buckets]
        request = {"want": "gradients", "buckets": wanted}
        start_ns = time.monotonic_ns()
        answers = engine.ask_all(request, partial(_limits, buckets))
        observer().wait("gradients", -1, start_ns, time.monotonic_ns())
        whole = self._assemble(buckets, answers)
        with torch_private.without_user_modes():
            for slot in slots:
                if slot.grad is None and not engine.usage.anywhere(slot):
                    slot.unused_everywhere = True  # it stays as it is where nobody looks
                    continue
                _write_average(slot, whole)
                slot.pending = False
                slot.whole = slot.grad
                if not slot.stepped:
                    slot.leave()
        engine.unsettle()

    def _assemble(
        self, buckets: Sequence[LiveBucket], answers: Mapping[int, Answer]
    ) -> dict[LiveBucket, torch.Tensor]:
        whole = {bucket: torch.empty_like(bucket.buffer, device=bucket.device) for bucket in buckets}
        for bucket, flat in whole.items():
            with bucket.fence.acquire():  # the next reduction writes over it
                flat[bucket.own] = self._shards[bucket.index].gradient
        for rank, answer in answers.items():
            take = reader(answer.payload)
            for bucket, flat in whole.items():
                low, high = bucket.bounds[rank]
                flat[low:high] = take(high - low, flat.dtype)
        return whole

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """This rank's shards of the gradients that a peer asks for, as soon as they are there."""
        return {}, [self._gradient_of(*wanted) for wanted in request["buckets"]]

    def _gradient_of(self, index: int, reduction: int, changes: int) -> torch.Tensor:
        """A rank can be ahead of who asks by a reduction it waits in, not by one that is done: that needs all ranks.

        Clipping and unscaling need all ranks too.
        """
        shard = self._shards[index]
        self._engine.until(lambda: shard.reductions >= reduction and shard.changes >= changes)
        shard.kept.wait(reduction)
        return shard.gradient.cpu()

    # Changes -----------------------------------------------------------------------------------------------

    def clip(
        self, slots: Sequence[ParameterState], max_norm: float, norm_type: float, error: bool
    ) -> torch.Tensor:
        """Clip the gradients of ``slots`` by their total norm, which is returned.

        Raises RuntimeError, as stock torch does, where ``error`` and the norm is not finite.
        """
        self._await(slots)
        norms = self._exchanged(clipping.norm_of([g for slot in slots for g in self._own(slot)], norm_type))
        norm = torch.tensor(clipping.joined(norms, norm_type), dtype=slots[0].parameter.dtype)
        factor = clipping.coefficient(norm, max_norm, norm_type, error)
        for gradient in self._all(slots):
            gradient.mul_(factor)
        self._changed(slots)
        return norm

    def unscale(
        self, slots: Sequence[ParameterState], inverse_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        """Multiply the gradients of ``slots``, and set ``found_inf`` to 1 where some element of any is not finite."""
        self._await(slots)
        finite = all(bool(torch.isfinite(gradient).all()) for slot in slots for gradient in self._own(slot))
        # Nothing is changed before every rank has come here: one that is behind may still ask for it as it is.
        found = self._exchanged(float(not finite)).any()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for gradient in self._all(slots):
            by_dtype[gradient.dtype].append(gradient)
        for gradients in by_dtype.values():
            torch_private.unscale(gradients, found_inf, inverse_scale)
        found_inf.fill_(float(found))
        self._changed(slots)

    def _await(self, slots: Sequence[ParameterState]) -> None:
        for bucket in _buckets_of(slots):
            assert bucket.reduce is not None
            self._engine.wait(bucket.reduce)

    def _own(self, slot: ParameterState) -> list[torch.Tensor]:
        """This rank's pieces of a gradient, as the script would see them."""
        pieces = self._pieces[slot]
        if slot.pending:
            return [piece.gradient for piece in pieces]
        assert slot.grad is not None
        flat = slot.grad.detach().reshape(-1)
        return [flat[piece.start : piece.end] for piece in pieces]

    def _all(self, slots: Sequence[ParameterState]) -> list[torch.Tensor]:
        """What this rank holds of the gradients: its pieces, which peers may ask for, and those it holds whole."""
        pieces = [piece.gradient for slot in slots for piece in self._pieces[slot]]
        return pieces + [slot.grad.detach() for slot in slots if not slot.pending and slot.grad is not None]

    def _exchanged(self, number: float) -> torch.Tensor:
        """``number`` of each rank, of shape (world size,)."""
        engine = self._engine
        numbers = torch.zeros(engine.world_size, dtype=torch.float64, device="cpu")
        numbers[engine.rank] = number
        engine.wait(engine.submit(engine.all_reduce(numbers)))
        return numbers

    def _changed(self, slots: Sequence[ParameterState]) -> None:
        for slot in slots:
            slot.changed = slot.pending
            slot.unreduced = (
                None  # what is accumulated from now on is so onto what was changed, on every rank
            )
        for bucket in _buckets_of(slots):
            self._shards[bucket.index].changes += 1
        self._engine.unsettle()  # the next backward must find it brought


def _limits(buckets: Sequence[LiveBucket], rank: int) -> Limits:
    """How much an answer of ``rank`` with its shards of ``buckets`` can be."""
    shares = ((bucket.bounds[rank], bucket.buffer.element_size()) for bucket in buckets)
    return Limits(payload_bytes=sum((high - low) * size_bytes for (low, high), size_bytes in shares))


def _buckets_of(slots: Sequence[ParameterState]) -> list[LiveBucket]:
    return list(dict.fromkeys(place.bucket for slot in slots for place in slot.places))


def _write_average(slot: ParameterState, whole: Mapping[LiveBucket, torch.Tensor]) -> None:
    gradient = slot.grad
    local = None
    if gradient is None:
        gradient = slot.grad = torch.zeros_like(slot.parameter.detach())
    else:
        local = gradient.detach().clone()
    for place in slot.places:
        flat_copy(
            gradient, place.start, whole[place.bucket][place.offset : place.offset + place.end - place.start]
        )
    slot.unreduced = Replaced(local, gradient.detach().clone())


def put_back(slot: ParameterState) -> None:
    """Take a look at an average back: ranks that looked and ranks that did not must hold the same kind of gradient."""
    assert slot.unreduced is not None
    shown = slot.shows_average
    replaced, slot.unreduced = slot.unreduced, None
    gradient = slot.grad
    if gradient is None or gradient is not slot.whole:
        return
    if shown:
        if replaced.local is None:
            slot.grad = None
        else:
            gradient.detach().copy_(replaced.local)
        slot.begin()
        slot.average_exposed = replaced.local is not None
    elif slot.unreduced_here:  # a local backward was added to the average, here and perhaps nowhere else
        gradient.detach().sub_(replaced.average)
        if replaced.local is not None:
            gradient.detach().add_(replaced.local)
