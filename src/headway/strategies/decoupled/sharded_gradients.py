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
from headway.strategies.decoupled.asking import Asking
from headway.strategies.decoupled.bucket import LiveBucket
from headway.strategies.decoupled.condition import Condition
from headway.strategies.decoupled.copying import flat_copy
from headway.strategies.decoupled.layout import Layout
from headway.strategies.decoupled.messages import Answer, Limits, Reply
from headway.strategies.decoupled.norms import coefficient, joined, norm_of
from headway.strategies.decoupled.parameter_state import ParameterState, Replaced
from headway.strategies.decoupled.shard import Piece, Shard, reader
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.decoupled.usage import Usage
from headway.strategies.live.channels.observer import observer


class ShardedGradients:
    """The reduced gradients of one engine.

    Every rank calls ``clip`` and ``unscale`` at the same point, with the same states; ``bring`` is each one's affair.
    """

    def __init__(
        self,
        layout: Layout,
        transport: BucketTransport,
        usage: Usage,
        asking: Asking,
        condition: Condition,
        shards: Sequence[Shard],
        pieces: Mapping[ParameterState, Sequence[Piece]],
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._usage = usage
        self._asking = asking
        self._condition = condition
        self._shards = shards
        self._pieces = pieces

    def bring(self) -> None:
        """Get the other ranks' shards of every reduced gradient, and write averages into ``.grad``."""
        states = [state for state in self._layout.states if state.phase.to_bring]
        if not states:
            return
        self._await(states)
        buckets = _buckets_of(states)
        wanted = [[b.index, b.reductions, self._shards[b.index].changes] for b in buckets]
        request = {"want": "gradients", "buckets": wanted}
        start_ns = time.monotonic_ns()
        answers = self._asking.ask_all(request, partial(_limits, buckets))
        observer().wait("gradients", -1, start_ns, time.monotonic_ns())
        whole = self._assemble(buckets, answers)
        with torch_private.without_user_modes():
            for state in states:
                if state.grad is None and not self._usage.anywhere(state):
                    state.find_unused()  # it stays as it is where nobody looks
                else:
                    state.show_average(_write_average(state, whole))
        self._condition.defer_work()

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
        self._asking.until(lambda: shard.reductions >= reduction and shard.changes >= changes)
        shard.kept.wait(reduction)
        return shard.gradient.cpu()

    # Changes -----------------------------------------------------------------------------------------------

    def clip(
        self, states: Sequence[ParameterState], max_norm: float, norm_type: float, error: bool
    ) -> torch.Tensor:
        """Clip the gradients of ``states`` by their total norm, which is returned.

        Raises RuntimeError, as stock torch does, where ``error`` and the norm is not finite.
        """
        self._await(states)
        norms = self._exchanged(norm_of([g for state in states for g in self._own(state)], norm_type))
        norm = torch.tensor(joined(norms, norm_type), dtype=states[0].parameter.dtype)
        factor = coefficient(norm, max_norm, norm_type, error)
        for gradient in self._all(states):
            gradient.mul_(factor)
        self._changed(states)
        return norm

    def unscale(
        self, states: Sequence[ParameterState], inverse_scale: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        """Multiply the gradients of ``states``, and set ``found_inf`` to 1 where some element of any is not finite."""
        self._await(states)
        finite = all(
            bool(torch.isfinite(gradient).all()) for state in states for gradient in self._own(state)
        )
        # Nothing is changed before every rank has come here: one that is behind may still ask for it as it is.
        found = self._exchanged(float(not finite)).any()
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for gradient in self._all(states):
            by_dtype[gradient.dtype].append(gradient)
        for gradients in by_dtype.values():
            torch_private.unscale(gradients, found_inf, inverse_scale)
        found_inf.fill_(float(found))
        self._changed(states)

    def _await(self, states: Sequence[ParameterState]) -> None:
        for bucket in _buckets_of(states):
            assert bucket.reduce is not None
            self._transport.wait(bucket.reduce)

    def _own(self, state: ParameterState) -> list[torch.Tensor]:
        """This rank's pieces of a gradient, as the script would see them."""
        pieces = self._pieces[state]
        if state.phase.pending:
            return [piece.gradient for piece in pieces]
        assert state.grad is not None
        flat = state.grad.detach().reshape(-1)
        return [flat[piece.start : piece.end] for piece in pieces]

    def _all(self, states: Sequence[ParameterState]) -> list[torch.Tensor]:
        """What this rank holds of the gradients: its pieces, which peers may ask for, and those it holds whole."""
        pieces = [piece.gradient for state in states for piece in self._pieces[state]]
        return pieces + [
            state.grad.detach() for state in states if not state.phase.pending and state.grad is not None
        ]

    def _exchanged(self, number: float) -> torch.Tensor:
        """``number`` of each rank, of shape (world size,)."""
        transport = self._transport
        numbers = torch.zeros(transport.world_size, dtype=torch.float64, device="cpu")
        numbers[transport.rank] = number
        transport.wait(transport.submit(transport.all_reduce(numbers)))
        return numbers

    def _changed(self, states: Sequence[ParameterState]) -> None:
        for state in states:
            state.rescale()
        for bucket in _buckets_of(states):
            self._shards[bucket.index].changes += 1
        self._condition.defer_work()  # the next backward must find it brought


def _limits(buckets: Sequence[LiveBucket], rank: int) -> Limits:
    """How much an answer of ``rank`` with its shards of ``buckets`` can be."""
    shares = ((bucket.bounds[rank], bucket.buffer.element_size()) for bucket in buckets)
    return Limits(payload_bytes=sum((high - low) * size_bytes for (low, high), size_bytes in shares))


def _buckets_of(states: Sequence[ParameterState]) -> list[LiveBucket]:
    return list(dict.fromkeys(view.bucket for state in states for view in state.views))


def _write_average(state: ParameterState, whole: Mapping[LiveBucket, torch.Tensor]) -> Replaced:
    gradient = state.grad
    local = None
    if gradient is None:
        gradient = state.grad = torch.zeros_like(state.parameter.detach())
    else:
        local = gradient.detach().clone()
    for view in state.views:
        flat_copy(gradient, view.start, whole[view.bucket][view.offset : view.offset + view.end - view.start])
    return Replaced(local, gradient.detach().clone())
