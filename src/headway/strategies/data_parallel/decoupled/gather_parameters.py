"""Form (b): each rank updates its shard of the parameters, and the parameters are gathered under the next forward.

Nothing is gathered before a step. A step queues, for each bucket, this rank's share of the update, as soon as the
bucket is reduced, and the all-gather of the parameters. So an optimizer's work and state fall to one over the world
size (ZeRO stage 1, Rajbhandari et al., 2020, with DeAR's overlap). Whoever looks at a gradient or at the
optimizer's state meanwhile gets the other shards from the ranks that hold them, whose scripts need not take part.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from headway import torch_private
from headway.collectives.algorithms import ALL_GATHER
from headway.errors import UnsupportedError
from headway.strategies.data_parallel.decoupled import clipping, deferred
from headway.strategies.data_parallel.decoupled.bucket import LiveBucket, Slot, Unit, flat_copy
from headway.strategies.data_parallel.decoupled.engine import Engine
from headway.strategies.data_parallel.decoupled.kinds import Kind
from headway.strategies.data_parallel.decoupled.observer import observer
from headway.strategies.data_parallel.decoupled.peers import Answer, Reply
from headway.strategies.data_parallel.decoupled.shard import (
    Piece,
    Shard,
    ShardedState,
    State,
    pack,
    reader,
    spans_of,
    unpack,
)
from headway.strategies.data_parallel.decoupled.stand_in import StandIn
from headway.strategies.data_parallel.decoupled.state import WatchedState

POLL_S = 0.001


class GatherParameters:
    """Shards of every bucket, and what each optimizer keeps over them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams = engine.wiring.streams
        self._shards = [Shard(bucket, engine.rank, self._streams) for bucket in engine.buckets]
        self._pieces: dict[Slot, list[Piece]] = defaultdict(list)
        for shard in self._shards:
            for piece in shard.pieces:
                self._pieces[piece.slot].append(piece)
        self._optimizers: list[weakref.ref[Optimizer]] = []  # in the order of their first step, on every rank
        self._states: list[ShardedState] = []

    # A backward ---------------------------------------------------------------------------------------

    def before_gradients(self) -> None:
        """Settle values that forward left untouched; put local gradients back where a look replaced them."""
        self._engine.settle_values()
        clipped = [slot for slot in self._engine.slots if slot.clipped and not slot.cleared]
        for slot in clipped:
            slot.before_gradient_read()  # what is accumulated onto is clipped, on every rank
            slot.unreduced = None
        for slot in self._engine.slots:
            if slot.unreduced is not None:
                _put_back(slot)

    def begin_backward(self) -> None:
        """Let go of gradients that were reduced and never stepped: each rank still has its own.

        What is accumulated onto them averages to the same as if it were accumulated onto their average.
        """
        for bucket in self._engine.buckets:
            if bucket.unit.in_flight and bucket.reduce is not None:
                self._engine.wait(bucket.reduce)  # its buffer is about to be filled anew
            bucket.unit.in_flight = False
        for slot in self._engine.slots:
            if slot.pending:
                slot.leave()
        for state in self._states:
            state.forget()

    def reduced(self, index: int) -> None:
        """Nothing is gathered before a step."""

    def keep(self, index: int) -> Callable[[], None]:
        """What is done with the shard of bucket ``index`` as soon as it is reduced."""
        return partial(self._shards[index].keep_gradient, self._engine.buckets[index].reductions)

    # A step ---------------------------------------------------------------------------------------------

    def takes(self, slot: Slot, kind: Kind, *, scaled_by_amp: bool) -> bool:
        """Whether there is a gradient to update by; what an optimizer by parameter needs is brought here."""
        del scaled_by_amp  # the stand-in keeps what a scaler takes away
        if slot.unit.stepped:
            self._engine.settle_value(slot.unit)
        if kind is not Kind.ELEMENT:
            slot.before_gradient_read()
            return False
        return slot.pending or slot.grad is not None

    def step(
        self,
        optimizer: Optimizer,
        hyper_parameters: Sequence[dict[str, Any]],
        slots: Sequence[Sequence[Slot]],
    ) -> None:
        """Queue the updates and gathers of every bucket that holds a part of ``slots``."""
        engine = self._engine
        state = self._state_of(optimizer)
        taken = {slot: index for index, group in enumerate(slots) for slot in group}
        looked_past = [slot for slot in taken if slot.shares_storage()]
        gradients: dict[Piece, torch.Tensor] = {}  # those that are the script's own by now
        defined = {slot for slot in taken if slot.grad is not None}
        for slot in taken:
            self._absorb(optimizer, slot, state)
            if not slot.pending:
                for piece in self._pieces[slot]:
                    gradients[piece] = _flat(slot.grad)[piece.start : piece.end].clone()
            slot.step()
        units = {slot.unit for slot in taken}
        for unit in units:
            unit.stepped = True
        for number in engine.schedule.gather_order:
            bucket = engine.buckets[number]
            if bucket.unit in units:
                groups = partial(self._groups, self._shards[number], hyper_parameters, taken, defined)
                draft: defaultdict[Any, State] = defaultdict(dict)
                stand_in = StandIn(optimizer, groups, draft)
                lent = [
                    *gradients.values(),
                    *torch_private.tensors_in(list(hyper_parameters)),
                    *stand_in.lent,
                ]
                step = self._streams.carry(
                    partial(torch_private.unhooked_step(type(optimizer)), stand_in), lent
                )
                state.asked[number] += 1
                update = partial(self._update, self._shards[number], state, draft, step, gradients)
                commit = partial(state.commit, number, draft)
                earlier = () if bucket.reduce is None else (bucket.reduce,)
                bucket.gather = engine.collective(
                    ALL_GATHER, bucket, before=update, after=(*earlier, *engine.usage.jobs), then=commit
                )
                bucket.unit.in_flight = True
        engine.unsettle()
        for slot in looked_past:
            engine.warn_of_aliases(slot.name)
            engine.settle_value(slot.unit)

    def _groups(
        self,
        shard: Shard,
        hyper_parameters: Sequence[dict[str, Any]],
        taken: Mapping[Slot, int],
        defined: Collection[Slot],
    ) -> list[dict[str, Any]]:
        """Parameter groups of this rank's pieces; a parameter that no rank used is left out, as without a gradient."""
        lists: list[list[torch.Tensor]] = [[] for _ in hyper_parameters]
        for piece in shard.pieces:
            if piece.slot in taken and (piece.slot in defined or self._engine.usage.anywhere(piece.slot)):
                lists[taken[piece.slot]].append(piece.parameter)
        return [{**h, "params": p} for h, p in zip(hyper_parameters, lists, strict=True) if p]

    @staticmethod
    def _update(
        shard: Shard,
        state: ShardedState,
        draft: dict[Any, State],
        step: Callable[[], object],
        gradients: Mapping[Piece, torch.Tensor],
    ) -> None:
        """Update the shard's values, and a draft of its state: a rank that has yet to step may ask for the old one."""
        with torch_private.without_user_modes():
            for piece in shard.pieces:
                value = piece.parameter.detach()
                value.copy_(_flat(piece.slot.parameter)[piece.start : piece.end])
                # Not written over the reduced gradient, which a slower rank may still ask for.
                piece.parameter.grad = gradients.get(piece, piece.gradient)
                draft[piece.parameter] = state.copy_of(piece)
            if shard.pieces:
                step()
            shard.publish()

    # Settling ---------------------------------------------------------------------------------------------

    def settle_value(self, unit: Unit) -> None:
        """Copy gathered parameters out of the buckets of ``unit``."""
        stepped = [slot for slot in unit.slots if slot.stepped]
        if not stepped:
            return
        for bucket in unit.buckets:
            assert bucket.gather is not None
            self._engine.wait(bucket.gather)
        start_ns = time.monotonic_ns()
        with torch_private.without_user_modes(), unit.turn():
            for slot in stepped:
                for place in slot.places:
                    flat_copy(slot.parameter, place.start, place.view)
                slot.stepped = False
                if slot.cleared or not slot.pending:
                    slot.leave()
        unit.stepped = False
        unit.in_flight = any(slot.pending for slot in unit.slots)
        observer().update(unit.buckets[0].index, start_ns, time.monotonic_ns())

    def settle_gradient(self, unit: Unit) -> None:
        """Get the other ranks' shards of every reduced gradient, and write averages into ``.grad``."""
        del (
            unit
        )  # who looks at one gradient mostly looks at all, and one question a rank is quicker than many
        engine = self._engine
        slots = [slot for slot in engine.slots if slot.pending and not slot.cleared]
        buckets = list(dict.fromkeys(place.bucket for slot in slots for place in slot.places))
        for bucket in buckets:
            assert bucket.reduce is not None
            engine.wait(bucket.reduce)
        wanted = [[b.index, b.reductions, self._shards[b.index].clips] for b in buckets]
        request = {"want": "gradients", "buckets": wanted}
        whole = self._assemble(buckets, engine.ask_all(request))
        with torch_private.without_user_modes():
            for slot in slots:
                if slot.grad is not None or engine.usage.anywhere(slot):
                    _write_average(slot, whole)
                slot.pending = False
                if not slot.stepped:
                    slot.leave()
        engine.unsettle()

    def _assemble(
        self, buckets: Sequence[LiveBucket], answers: Mapping[int, Answer]
    ) -> dict[LiveBucket, torch.Tensor]:
        whole = {bucket: torch.empty_like(bucket.buffer, device=bucket.device) for bucket in buckets}
        for bucket, flat in whole.items():
            with bucket.turns.turn():  # the next reduction writes over it
                flat[bucket.own] = self._shards[bucket.index].gradient
        for rank, answer in answers.items():
            take = reader(answer.payload)
            for bucket, flat in whole.items():
                low, high = bucket.bounds[rank]
                flat[low:high] = take(high - low, flat.dtype)
        return whole

    def clip(self, slots: Sequence[Slot], max_norm: float, norm_type: float, error: bool) -> torch.Tensor:
        """Sum the norms of all ranks' pieces, and scale the own ones."""
        engine = self._engine
        buckets = list(dict.fromkeys(place.bucket for slot in slots for place in slot.places))
        for bucket in buckets:
            assert bucket.reduce is not None
            engine.wait(bucket.reduce)
        pieces = [piece.gradient for slot in slots for piece in self._pieces[slot]]
        norms = torch.zeros(engine.world_size, dtype=torch.float64, device="cpu")
        norms[engine.rank] = clipping.norm_of(pieces, norm_type)
        engine.wait(engine.submit(engine.all_reduce(norms)))
        norm = torch.tensor(clipping.joined(norms, norm_type), dtype=slots[0].parameter.dtype)
        factor = clipping.coefficient(norm, max_norm, norm_type, error)
        for piece_gradient in pieces:
            piece_gradient.mul_(factor)
        for slot in slots:
            slot.clipped = True
        for bucket in buckets:
            self._shards[bucket.index].clips += 1
        return norm

    # The optimizer's state --------------------------------------------------------------------------------

    def _state_of(self, optimizer: Optimizer) -> ShardedState:
        for known, state in zip(self._optimizers, self._states, strict=True):
            if known() is optimizer:
                return state
        self._optimizers.append(weakref.ref(optimizer))
        self._states.append(ShardedState(self._streams))
        return self._states[-1]

    def _absorb(self, optimizer: Optimizer, slot: Slot, state: ShardedState) -> None:
        """Keep this rank's share of what the optimizer holds whole: at the start, after a look, a load or a change."""
        assert isinstance(optimizer.state, WatchedState)
        whole = optimizer.state.take(slot.parameter)
        if whole is not None or slot in state.looked_at:
            state.absorb(slot, self._pieces[slot], whole or {})

    def state_replaced(self, optimizer: Optimizer) -> None:
        """Forget the shards: the script's new state is whole."""
        if any(known() is optimizer for known in self._optimizers):
            state = self._state_of(optimizer)
            state.looked_at.update(self._engine.slots)  # what is kept for them gives way at their next step

    def state_wanted(self, optimizer: Optimizer) -> None:
        """Put the whole state of every parameter into ``optimizer.state``, from the ranks that hold it."""
        if all(known() is not optimizer for known in self._optimizers):
            return
        assert isinstance(optimizer.state, WatchedState)
        state = self._state_of(optimizer)
        number = [known() for known in self._optimizers].index(optimizer)
        request = {"want": "state", "optimizer": number, "asked": list(state.asked.items())}
        found = {self._engine.rank: [state.of.get(p.parameter, {}) for s in self._shards for p in s.pieces]}
        for rank, answer in self._engine.ask_all(request).items():
            found[rank] = unpack(answer.header["states"], answer.payload, self._engine.wiring.device)
        wholes = self._whole_states(found)
        for slot in (deferred.entry_of(p) for group in optimizer.param_groups for p in group["params"]):
            if slot in wholes and slot not in state.looked_at:
                optimizer.state.put(slot.parameter, wholes[slot])
                state.looked_at.add(slot)

    def _whole_states(self, found: Mapping[int, Sequence[State]]) -> dict[Slot, State]:
        wholes: dict[Slot, State] = {}
        for rank, states in found.items():
            spans = [span for bucket in self._engine.buckets for span in spans_of(bucket, rank)]
            for span, state in zip(spans, states, strict=True):
                for key, value in state.items():
                    _put_together(wholes.setdefault(span.slot, {}), key, value, span)
        return wholes

    def lose_states(self) -> None:
        """The other ranks cannot be asked any more: say so to whoever looks, rather than show a share."""
        for known, state in zip(self._optimizers, self._states, strict=True):
            optimizer = known()
            if optimizer is not None and isinstance(optimizer.state, WatchedState) and any(state.of.values()):
                optimizer.state.lost = optimizer.state.behind

    def leave(self) -> None:
        """Let every optimizer hold its whole state."""
        for known in self._optimizers:
            if (optimizer := known()) is not None:
                self.state_wanted(optimizer)

    # For peers --------------------------------------------------------------------------------------------

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """What a peer asked for, as soon as this rank has come that far."""
        if request["want"] == "gradients":
            return {}, [self._gradient_of(*wanted) for wanted in request["buckets"]]
        return self._state_answer(int(request["optimizer"]), request["asked"])

    def _gradient_of(self, index: int, reduction: int, clips: int) -> torch.Tensor:
        """A rank can be ahead of who asks by a reduction it waits in, not by one that is done: that needs all ranks.

        Clipping needs all ranks too.
        """
        shard = self._shards[index]
        self._until(lambda: shard.reductions >= reduction and shard.clips >= clips)
        shard.kept.wait(reduction)
        return shard.gradient.cpu()

    def _state_answer(self, number: int, asked: Sequence[tuple[int, int]]) -> Reply:
        self._until(lambda: len(self._states) > number)
        state = self._states[number]
        self._until(lambda: all(state.applied[index] >= count for index, count in asked))
        found = state.after(dict(asked))
        if found is None:
            raise UnsupportedError(
                "an optimizer's state was looked at on one rank while the others stepped it again without a backward",
                fix="Look at the state on every rank.",
            )
        described, tensors = pack([found.get(p.parameter) for s in self._shards for p in s.pieces])
        return {"states": described}, tensors

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._engine.peers.timeout_s
        while not condition():
            if self._engine.failed or self._engine.closed or time.monotonic() > deadline:
                raise UnsupportedError("a rank did not come to the point that another asked it about")
            time.sleep(POLL_S)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.detach().reshape(-1)


def _write_average(slot: Slot, whole: Mapping[LiveBucket, torch.Tensor]) -> None:
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
    slot.unreduced = (local, gradient._version)


def _put_back(slot: Slot) -> None:
    """Ranks that looked at an average and ranks that did not must hold the same kind of gradient."""
    assert slot.unreduced is not None
    local, version = slot.unreduced
    slot.unreduced = None
    gradient = slot.grad
    if gradient is not None and gradient._version == version:
        if local is None:
            slot.grad = None
        else:
            gradient.detach().copy_(local)
        slot.begin()


def _put_together(whole: State, key: str, value: Any, span: Any) -> None:
    parameter = span.slot.parameter
    if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == span.end - span.start:
        if key not in whole:
            whole[key] = torch.zeros(parameter.shape, dtype=value.dtype, device=value.device)
        whole[key].view(-1)[span.start : span.end] = value
    else:
        whole[key] = value.clone() if isinstance(value, torch.Tensor) else value
