"""What is spread over ranks: reduced gradients, and the optimizer's state."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.decoupled.buckets import LiveBucket, flat_copy, laid_out_like
from headway.strategies.decoupled.condition import Condition
from headway.strategies.decoupled.layout import Layout, Usage
from headway.strategies.decoupled.optimizers import WatchedState
from headway.strategies.decoupled.parameter_state import ParameterState, Replaced
from headway.strategies.decoupled.peers import HEADER_BYTES, Answer, Asking, Limits, Reply
from headway.strategies.decoupled.shard import (
    Piece,
    Shard,
    ShardedState,
    Span,
    State,
    coefficient,
    joined,
    norm_of,
    pack,
    reader,
    spans_of,
    unpack,
)
from headway.strategies.decoupled.transport import BucketTransport
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


MAX_STATES = 8  # of one parameter; torch's optimizers that go by element have up to five
DESCRIPTION_BYTES = 256  # of one of them in a header
NUMBER_BYTES = 8  # of the widest real number


class ShardedStates:
    """The states of all optimizers of one engine, in the order of their first step, which is the same on every rank."""

    def __init__(
        self,
        layout: Layout,
        transport: BucketTransport,
        asking: Asking,
        shards: Sequence[Shard],
        pieces: Mapping[ParameterState, Sequence[Piece]],
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._asking = asking
        self._shards = shards
        self._pieces = pieces
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._states: list[ShardedState] = []
        self._noticed_dead: dict[int, int] = {}  # optimizer: how many reductions had been queued

    @property
    def size_bytes(self) -> int:
        """What this rank keeps of all of them."""
        kept = (value for state in self._states for one in state.of.values() for value in one.values())
        return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))

    def of(self, optimizer: Optimizer) -> ShardedState:
        """What is kept for ``optimizer``; from its first step on there is something."""
        for known, state in zip(self._optimizers, self._states, strict=True):
            if known() is optimizer:
                return state
        self._optimizers.append(weakref.ref(optimizer))
        self._states.append(ShardedState(self._transport.streams))
        return self._states[-1]

    def absorb(self, optimizer: Optimizer, owner: ParameterState, state: ShardedState) -> None:
        """Keep this rank's share of what the optimizer holds whole: at the start, after a look, a load or a change."""
        assert isinstance(optimizer.state, WatchedState)
        whole = optimizer.state.take(owner.parameter)
        if whole is not None or owner in state.looked_at:
            state.absorb(owner, self._pieces[owner], whole or {})

    def forget(self) -> None:
        """Let go of earlier states that nobody can ask for any more. Called as a backward begins."""
        for number, (known, state) in enumerate(zip(self._optimizers, self._states, strict=True)):
            if known() is None and self._is_dead_everywhere(
                number
            ):  # its number stays: other ranks ask by it
                state.of.clear()
                state.runs.clear()
                state.gone = True
            state.forget()

    def _is_dead_everywhere(self, number: int) -> bool:
        """Whether no rank can ask any more for the state of an optimizer that is dead on this one.

        A slower rank may be about to look at it still. It has not contributed to a reduction of a later backward then.
        """
        bucket = self._layout.buckets[0]
        noticed = self._noticed_dead.setdefault(number, bucket.reductions)
        return bucket.reductions > noticed and bucket.reduce is not None and bucket.reduce.is_over

    def replaced(self, optimizer: Optimizer) -> None:
        """Forget the shards: the script's new state is whole."""
        if any(known() is optimizer for known in self._optimizers):
            state = self.of(optimizer)
            state.looked_at.update(self._layout.states)  # what is kept for them gives way at their next step

    def wanted(self, optimizer: Optimizer) -> None:
        """Put the whole state of every parameter into ``optimizer.state``, from the ranks that hold it."""
        if all(known() is not optimizer for known in self._optimizers):
            return
        assert isinstance(optimizer.state, WatchedState)
        state = self.of(optimizer)
        number = [known() for known in self._optimizers].index(optimizer)
        request = {"want": "state", "optimizer": number, "asked": list(state.asked.items())}
        found = {self._transport.rank: [state.of.get(p, {}) for s in self._shards for p in s.pieces]}
        for rank, answer in self._asking.ask_all(request, self._limits).items():
            found[rank] = unpack(answer.header["states"], answer.payload, self._layout.device)
        wholes = self._whole(found)
        owners = {id(owner.parameter): owner for owner in self._layout.states}
        for owner in (owners.get(id(p)) for group in optimizer.param_groups for p in group["params"]):
            if owner in wholes and owner not in state.looked_at:
                optimizer.state.put(owner.parameter, wholes[owner])
                state.looked_at.add(owner)

    def _limits(self, rank: int) -> Limits:
        """How much an answer of ``rank`` with its share of a state can be, whatever the optimizer."""
        header_bytes = payload_bytes = 0
        for bucket in self._layout.buckets:
            widest_bytes = max(NUMBER_BYTES, bucket.buffer.element_size())
            for span in spans_of(self._layout, bucket, rank):
                header_bytes += MAX_STATES * DESCRIPTION_BYTES
                payload_bytes += MAX_STATES * widest_bytes * (span.end - span.start)
        return Limits(HEADER_BYTES + header_bytes, payload_bytes)

    def _whole(self, found: Mapping[int, Sequence[State]]) -> dict[ParameterState, State]:
        wholes: dict[ParameterState, State] = {}
        for rank, states in found.items():
            spans = [span for bucket in self._layout.buckets for span in spans_of(self._layout, bucket, rank)]
            for span, state in zip(spans, states, strict=True):
                for key, value in state.items():
                    _put_together(wholes.setdefault(span.owner, {}), key, value, span)
        return wholes

    def lose(self) -> None:
        """The other ranks cannot be asked any more: say so to whoever looks, rather than show a share."""
        for optimizer in self._spread():
            optimizer.state.lost = True  # type: ignore[attr-defined]

    def leave(self) -> None:
        """The wrapped model is gone and ranks go on answering: whoever looks brings the shares together."""
        for optimizer in self._spread():
            optimizer.state.left.append(self.wanted)  # type: ignore[attr-defined]

    @property
    def left(self) -> bool:
        """Whether somebody may yet look at what ``leave`` has left."""
        return any(self.wanted in optimizer.state.left for optimizer in self._spread())  # type: ignore[attr-defined]

    def _spread(self) -> list[Optimizer]:
        """The optimizers that are alive and do not hold their whole state."""
        pairs = [(known(), state) for known, state in zip(self._optimizers, self._states, strict=True)]
        return [
            optimizer
            for optimizer, state in pairs
            if optimizer is not None
            and isinstance(optimizer.state, WatchedState)
            and optimizer.state.behind
            and any(state.of.values())
        ]

    def hand_back(self) -> None:
        """Let every optimizer hold its whole state."""
        for known in self._optimizers:
            # Where a state was loaded since the last step, what is kept here is not the script's any more.
            if (optimizer := known()) is not None and isinstance(optimizer.state, WatchedState):
                self.wanted(optimizer)

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """This rank's share of the state that a peer asks for, after as many updates as the peer has asked for."""
        number, asked = int(request["optimizer"]), request["asked"]
        self._asking.until(lambda: len(self._states) > number)
        state = self._states[number]
        if state.gone:
            raise UnsupportedError(
                "an optimizer's state was read on one rank after others had dropped the optimizer and trained on",
                fix="Read the state on every rank, or keep the optimizer on every rank.",
            )
        self._asking.until(lambda: all(state.applied[index] >= count for index, count in asked))
        found = state.after(dict(asked))
        if found is None:
            raise UnsupportedError(
                "an optimizer's state was read on one rank while the others stepped it again without a backward",
                fix="Read the state on every rank.",
            )
        described, tensors = pack([found.get(p) for s in self._shards for p in s.pieces])
        return {"states": described}, tensors


def _put_together(whole: State, key: str, value: Any, span: Span) -> None:
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == span.end - span.start:
        if key not in whole:
            whole[key] = laid_out_like(span.owner.parameter, value)
        flat_copy(whole[key], span.start, value)
    else:
        whole[key] = value.clone() if isinstance(value, torch.Tensor) else value
