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
from headway.strategies.data_parallel.channels.observer import observer
from headway.strategies.data_parallel.decoupled.bucket import SettleGroup
from headway.strategies.data_parallel.decoupled.copying import copy_views
from headway.strategies.data_parallel.decoupled.engine import Engine
from headway.strategies.data_parallel.decoupled.granularity import UpdateGranularity
from headway.strategies.data_parallel.decoupled.messages import Reply
from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState, looked_past, note_steps
from headway.strategies.data_parallel.decoupled.shard import (
    Piece,
    Shard,
    ShardedState,
    State,
)
from headway.strategies.data_parallel.decoupled.sharded_gradients import ShardedGradients, put_back
from headway.strategies.data_parallel.decoupled.sharded_states import ShardedStates
from headway.strategies.data_parallel.decoupled.stand_in import StandIn


class GatherParameters:
    """Shards of every bucket, and what each optimizer keeps over them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams = engine.wiring.streams
        self._shards = [Shard(bucket, engine.rank, self._streams) for bucket in engine.buckets]
        self._pieces: dict[ParameterState, list[Piece]] = defaultdict(list)
        for shard in self._shards:
            for piece in shard.pieces:
                self._pieces[piece.slot].append(piece)
        self.sharded_gradients = ShardedGradients(engine, self._shards, self._pieces)
        self._states = ShardedStates(engine, self._shards, self._pieces)
        self._stepped_by: weakref.ref[Optimizer] | None = None  # the latest to step since the latest backward

    @property
    def state_bytes(self) -> int:
        """What this rank keeps of the optimizers' state."""
        return self._states.size_bytes

    # A backward ---------------------------------------------------------------------------------------

    def before_gradients(self) -> None:
        """Settle values that forward left untouched; put local gradients back where a look replaced them."""
        self._bring_changed()
        for slot in self._engine.slots:
            if slot.unreduced is not None:
                put_back(slot)

    def before_local_gradients(self) -> None:
        """Have them added to averages, which every rank holds, and not to what this rank alone contributed."""
        self._bring_changed()
        self.sharded_gradients.bring()
        for slot in self._engine.slots:
            if not slot.shows_average:
                slot.unreduced = None  # what a script has made of an average is its own

    def _bring_changed(self) -> None:
        self._engine.settle_values()
        changed = [slot for slot in self._engine.slots if slot.changed and not slot.cleared]
        for slot in changed:
            slot.before_gradient_read()  # what is accumulated onto is clipped, on every rank
            slot.unreduced = None

    def begin_backward(self) -> None:
        """Let go of gradients that were reduced and never stepped: each rank still has its own.

        What is accumulated onto them averages to the same as if it were accumulated onto their average.
        """
        self._stepped_by = None
        for bucket in self._engine.buckets:
            if bucket.unit.in_flight and bucket.reduce is not None:
                self._engine.wait(bucket.reduce)  # its buffer is about to be filled anew
            bucket.unit.in_flight = False
        for slot in self._engine.slots:
            slot.forget()
            if slot.pending:
                slot.leave()
        self._states.forget()

    def reduced(self, index: int) -> None:
        """Nothing is gathered before a step."""

    def keep(self, index: int) -> Callable[[], None]:
        """What is done with the shard of bucket ``index`` as soon as it is reduced."""
        return partial(self._shards[index].keep_gradient, self._engine.buckets[index].reductions)

    # A step ---------------------------------------------------------------------------------------------

    def stepped_by_another(self, optimizer: Optimizer) -> bool:
        """Whether a second optimizer steps after one backward.

        A bucket that both have parameters in would be gathered twice, and forward's first one after all of the
        first optimizer's.
        """
        return self._stepped_by is not None and self._stepped_by() is not optimizer

    def before_step(
        self, slots: Sequence[ParameterState], granularity: UpdateGranularity, *, scaled_by_amp: bool
    ) -> None:
        """Settle an earlier step; bring what an update that does not go by element, or not by shards, needs."""
        del scaled_by_amp  # the stand-in keeps what a scaler takes away
        for slot in slots:
            if slot.unit.stepped:
                self._engine.settle_value(slot.unit)
        if not self._shards_steps(granularity):
            for slot in slots:
                slot.before_gradient_read()

    def takes(self, slot: ParameterState, granularity: UpdateGranularity) -> bool:
        """Whether there is a gradient to update by, and each rank updates its share."""
        return self._shards_steps(granularity) and (slot.pending or slot.grad is not None)

    def _shards_steps(self, granularity: UpdateGranularity) -> bool:
        return granularity is UpdateGranularity.ELEMENTWISE and not self._engine.needs_gradients

    def step(
        self,
        optimizer: Optimizer,
        hyper_parameters: Sequence[dict[str, Any]],
        slots: Sequence[Sequence[ParameterState]],
    ) -> None:
        """Queue the updates and gathers of every bucket that holds a part of ``slots``."""
        engine = self._engine
        self._stepped_by = weakref.ref(optimizer)
        state = self._states.of(optimizer)
        taken = {slot: index for index, group in enumerate(slots) for slot in group}
        aliased = looked_past(taken, engine.wiring.device)
        gradients: dict[Piece, torch.Tensor] = {}  # those that are the script's own by now
        for slot in taken:
            self._states.absorb(optimizer, slot, state)
            if not slot.pending:
                for piece in self._pieces[slot]:
                    gradients[piece] = _flat(slot.grad)[piece.start : piece.end].clone()
            slot.step()
        note_steps(taken)
        defined = {slot for slot in taken if slot.defined}
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
        for slot in aliased:
            engine.warn_of_aliases(slot.name)
            engine.settle_value(slot.unit)

    def _groups(
        self,
        shard: Shard,
        hyper_parameters: Sequence[dict[str, Any]],
        taken: Mapping[ParameterState, int],
        defined: Collection[ParameterState],
    ) -> list[dict[str, Any]]:
        """Parameter groups of this rank's pieces; a parameter that no rank used is left out, as without a gradient."""
        lists: list[list[torch.Tensor]] = [[] for _ in hyper_parameters]
        for piece in shard.pieces:
            if piece.slot in taken and (piece.slot in defined or self._engine.usage.anywhere(piece.slot)):
                lists[taken[piece.slot]].append(piece.parameter)
        return [{**h, "params": p} for h, p in zip(hyper_parameters, lists, strict=True) if p]

    def _update(
        self,
        shard: Shard,
        state: ShardedState,
        draft: dict[Any, State],
        step: Callable[[], object],
        gradients: Mapping[Piece, torch.Tensor],
    ) -> None:
        """Update the shard's values, and a draft of its state: a rank that has yet to step may ask for the old one."""
        start_ns = time.monotonic_ns()
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
        if shard.on_host:  # elsewhere it has been launched and takes its time later
            observer().update_beside(self._engine, shard.bucket.index, start_ns, time.monotonic_ns())

    # Settling ---------------------------------------------------------------------------------------------

    def settle_value(self, unit: SettleGroup) -> None:
        """Copy gathered parameters out of the buckets of ``unit``."""
        stepped = [slot for slot in unit.slots if slot.stepped]
        if not stepped:
            return
        for bucket in unit.buckets:
            assert bucket.gather is not None
            self._engine.wait(bucket.gather)
        start_ns = time.monotonic_ns()
        with torch_private.without_user_modes(), unit.acquire():
            copy_views([(slot.parameter, place) for slot in stepped for place in slot.places])
            for slot in stepped:
                slot.settled()
        unit.stepped = False
        unit.in_flight = any(slot.pending for slot in unit.slots)
        observer().update(self._engine, unit.buckets[0].index, start_ns, time.monotonic_ns())

    def settle_gradient(self, unit: SettleGroup) -> None:
        """Write averages into ``.grad`` of every parameter.

        Who looks at one gradient mostly looks at all, and one question a rank is quicker than many.
        """
        del unit
        self.sharded_gradients.bring()

    # What others ask -----------------------------------------------------------------------------------------

    def state_wanted(self, optimizer: Optimizer) -> None:
        """Put the whole state of every parameter into ``optimizer.state``, from the ranks that hold it."""
        self._states.wanted(optimizer)

    def state_replaced(self, optimizer: Optimizer) -> None:
        """Forget the shards: the script's new state is whole."""
        self._states.replaced(optimizer)

    def lose_states(self) -> None:
        """The other ranks cannot be asked any more."""
        self._states.lose()

    def leave_states(self) -> None:
        """The wrapped model is gone: whoever looks at a state brings it together."""
        self._states.leave()

    @property
    def states_left(self) -> bool:
        """Whether somebody may yet look at a state that was left."""
        return self._states.left

    def leave(self) -> None:
        """Let every optimizer hold its whole state."""
        self._states.hand_back()

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """What a peer asked for, as soon as this rank has come that far."""
        about = self.sharded_gradients if request["want"] == "gradients" else self._states
        return about.answer(request)


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.detach().reshape(-1)
