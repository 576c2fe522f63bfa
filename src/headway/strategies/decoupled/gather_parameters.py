"""Parameters are gathered: each rank updates its shard of the parameters, and all get it under the next forward.

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
from headway.strategies.decoupled.buckets import copy_views
from headway.strategies.decoupled.condition import Condition
from headway.strategies.decoupled.granularity import UpdateGranularity
from headway.strategies.decoupled.layout import Layout, SettleGroup, Usage
from headway.strategies.decoupled.optimizers import StandIn
from headway.strategies.decoupled.parameter_state import ParameterState, looked_past, note_steps
from headway.strategies.decoupled.peers import Asking, Reply
from headway.strategies.decoupled.settlement import Settling
from headway.strategies.decoupled.shard import Members, Piece, Shard, ShardUpdate
from headway.strategies.decoupled.sharded import ShardedGradients, ShardedStates
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.observer import observer


class GatherParameters:
    """Shards of every bucket, and what each optimizer keeps over them."""

    def __init__(
        self,
        layout: Layout,
        transport: BucketTransport,
        usage: Usage,
        asking: Asking,
        settling: Settling,
        condition: Condition,
        owner: object,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._usage = usage
        self._settling = settling
        self._condition = condition
        self._owner = owner  # as observers know it
        self._streams = transport.streams
        self._shards = [Shard(layout, bucket, transport.rank, self._streams) for bucket in layout.buckets]
        self._pieces: dict[ParameterState, list[Piece]] = defaultdict(list)
        for shard in self._shards:
            for piece in shard.pieces:
                self._pieces[piece.owner].append(piece)
        self.sharded_gradients = ShardedGradients(
            layout, transport, usage, asking, condition, self._shards, self._pieces
        )
        self._states = ShardedStates(layout, transport, asking, self._shards, self._pieces)
        self._stepped_by: weakref.ref[Optimizer] | None = None  # the latest to step since the latest backward

    @property
    def state_bytes(self) -> int:
        """What this rank keeps of the optimizers' state."""
        return self._states.size_bytes

    # A backward ---------------------------------------------------------------------------------------

    def before_gradients(self) -> None:
        """Settle values that forward left untouched; put local gradients back where a look replaced them."""
        self._bring_rescaled()
        for state in self._layout.states:
            if state.replaced is not None:
                state.put_back()

    def before_local_gradients(self) -> None:
        """Have them added to averages, which every rank holds, and not to what this rank alone contributed."""
        self._bring_rescaled()
        self.sharded_gradients.bring()
        for state in self._layout.states:
            if not state.shows_average:
                state.keep_shown()  # what a script has made of an average is its own

    def _bring_rescaled(self) -> None:
        self._settling.settle_values()
        rescaled = [state for state in self._layout.states if state.rescaled and not state.phase.cleared]
        for state in rescaled:
            self._settling.read_gradient(state)  # what is accumulated onto is clipped, on every rank
            state.keep_shown()

    def begin_backward(self) -> None:
        """Let go of gradients that were reduced and never stepped: each rank still has its own.

        What is accumulated onto them averages to the same as if it were accumulated onto their average.
        """
        self._stepped_by = None
        for bucket, group in zip(self._layout.buckets, self._layout.group_at, strict=True):
            if group.in_flight and bucket.reduce is not None:
                self._transport.wait(bucket.reduce)  # its buffer is about to be refilled
        for group in self._layout.groups:  # some of several buckets, all of which were to be waited for
            group.in_flight = False
        for state in self._layout.states:
            state.forget_reduced()
        self._states.forget()

    def behind_reduction(self, index: int) -> Sequence[Job]:
        """Nothing is gathered before a step."""
        del index
        return ()

    def keep(self, index: int) -> Callable[[], None]:
        """What is done with the shard of bucket ``index`` as soon as it is reduced."""
        return partial(self._shards[index].keep_gradient, self._layout.buckets[index].reductions)

    # A step ---------------------------------------------------------------------------------------------

    def stepped_by_another(self, optimizer: Optimizer) -> bool:
        """Whether a second optimizer steps after one backward.

        A bucket that both have parameters in would be gathered twice, and forward's first one after all of the
        first optimizer's.
        """
        return self._stepped_by is not None and self._stepped_by() is not optimizer

    def before_step(
        self, states: Sequence[ParameterState], granularity: UpdateGranularity, *, scaled_by_amp: bool
    ) -> None:
        """Settle an earlier step; bring what an update that does not go by element, or not by shards, needs."""
        del scaled_by_amp  # the stand-in keeps what a scaler takes away
        if any(group.stepped for group in self._layout.groups):
            for group in dict.fromkeys(self._layout.group_of[state] for state in states):
                if group.stepped:
                    self._settling.settle_value(group)
        if not self._shards_steps(granularity):
            for state in states:
                self._settling.read_gradient(state)

    def takes(self, state: ParameterState, granularity: UpdateGranularity) -> bool:
        """Whether there is a gradient to update by, and each rank updates its share."""
        return self._shards_steps(granularity) and (state.phase.pending or state.grad is not None)

    def _shards_steps(self, granularity: UpdateGranularity) -> bool:
        return granularity is UpdateGranularity.ELEMENTWISE and not self._settling.needs_gradients

    def step(
        self,
        optimizer: Optimizer,
        hyper_parameters: Sequence[dict[str, Any]],
        states: Sequence[Sequence[ParameterState]],
    ) -> None:
        """Queue the updates and gathers of every bucket that holds a part of ``states``."""
        self._stepped_by = weakref.ref(optimizer)
        kept = self._states.of(optimizer)
        taken = {state: index for index, members in enumerate(states) for state in members}
        gradients: dict[Piece, torch.Tensor] = {}  # those that are the script's own by now
        for state in taken:
            self._states.absorb(optimizer, state, kept)
            if not state.phase.pending:
                for piece in self._pieces[state]:
                    gradients[piece] = _flat(state.grad)[piece.start : piece.end].clone()
            state.step()
        note_steps(taken)
        aliased = looked_past(taken, self._layout.device)  # from here on other threads' uses are noticed
        defined = {state for state in taken if state.had_gradient}
        groups = {self._layout.group_of[state] for state in taken}
        for group in groups:
            group.stepped = True
        of_hyper_parameters = torch_private.tensors_in(list(hyper_parameters))
        members = partial(self._members, taken, defined)
        for number in self._layout.schedule.gather_order:
            bucket, group = self._layout.buckets[number], self._layout.group_at[number]
            if group in groups:
                shard = self._shards[number]
                own = {piece: gradients[piece] for piece in shard.pieces if piece in gradients}
                due = ShardUpdate(shard, kept, hyper_parameters, members, own)
                stand_in = StandIn(optimizer, due.groups, due.working)
                step = partial(torch_private.unhooked_step(type(optimizer)), stand_in)
                lent = [*own.values(), *of_hyper_parameters, *stand_in.lent]
                update = partial(self._update, due, shard, self._streams.carry(step, lent))
                kept.asked[number] += 1
                commit = partial(kept.commit, number, due.draft)
                earlier = () if bucket.reduce is None else (bucket.reduce,)
                after = (*earlier, *self._usage.jobs)
                bucket.gather = self._transport.gathering(bucket, update, after, commit)
                self._transport.submit(bucket.gather)
                group.in_flight = True
        self._condition.defer_work()
        for state in aliased:
            self._condition.warn_of_aliases(state.name)
            self._settling.settle_value(self._layout.group_of[state])

    def _members(
        self, taken: Mapping[ParameterState, int], defined: Collection[ParameterState], shard: Shard
    ) -> Members:
        """Pieces to update; a parameter that no rank used is left out, as without a gradient."""
        return [
            (piece, taken[piece.owner])
            for piece in shard.pieces
            if piece.owner in taken and (piece.owner in defined or self._usage.anywhere(piece.owner))
        ]

    def _update(self, due: ShardUpdate, shard: Shard, step: Callable[[], object]) -> None:
        start_ns = time.monotonic_ns()
        with torch_private.without_user_modes():
            due.run(step)
            shard.publish()
        if shard.on_host:  # elsewhere it has been launched and takes its time later
            observer().background_update(self._owner, shard.bucket.index, start_ns, time.monotonic_ns())

    # Settling ---------------------------------------------------------------------------------------------

    def settle_value(self, group: SettleGroup) -> None:
        """Copy gathered parameters out of the buckets of ``group``."""
        stepped = [state for state in group.states if state.phase.stepped]
        if not stepped:
            return
        for bucket in group.buckets:
            assert bucket.gather is not None
            self._transport.wait(bucket.gather)
        start_ns = time.monotonic_ns()
        with torch_private.without_user_modes(), group.acquire():
            copy_views([(state.parameter, view) for state in stepped for view in state.views])
            for state in stepped:
                state.settle()
        group.stepped = False
        group.in_flight = any(state.phase.pending for state in group.states)
        observer().update(self._owner, group.buckets[0].index, start_ns, time.monotonic_ns())

    def settle_gradient(self, group: SettleGroup) -> None:
        """Write averages into ``.grad`` of every parameter.

        Who looks at one gradient mostly looks at all, and one question a rank is faster than many.
        """
        del group
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
