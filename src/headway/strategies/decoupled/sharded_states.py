"""What optimizers keep over shards: a share on each rank, brought together for who looks into ``optimizer.state``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from headway.errors import UnsupportedError
from headway.strategies.decoupled.asking import Asking
from headway.strategies.decoupled.copying import flat_copy, laid_out_like
from headway.strategies.decoupled.layout import Layout
from headway.strategies.decoupled.messages import HEADER_BYTES, Limits, Reply
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.shard import (
    Piece,
    Shard,
    ShardedState,
    Span,
    State,
    pack,
    spans_of,
    unpack,
)
from headway.strategies.decoupled.state import WatchedState
from headway.strategies.decoupled.transport import BucketTransport

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
