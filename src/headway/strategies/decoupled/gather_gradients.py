"""Gradients are gathered, and every rank runs the whole optimizer, a bucket at a time, when forward needs it.

The gathers stand behind the reduce-scatters of the same backward. So a step, a read or a further backward only ever
waits for what is queued, and a read on one rank alone can neither mix up collectives nor wait for something that other
ranks have yet to decide.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.decoupled.buckets import BucketView, copy_views, flat_copy, laid_out_like
from headway.strategies.decoupled.condition import Condition
from headway.strategies.decoupled.granularity import UpdateGranularity
from headway.strategies.decoupled.layout import Layout, SettleGroup, Usage
from headway.strategies.decoupled.optimizers import StandIn
from headway.strategies.decoupled.parameter_state import ParameterState, looked_past, note_steps
from headway.strategies.decoupled.peers import Reply
from headway.strategies.decoupled.settlement import Settling
from headway.strategies.decoupled.sharded import ShardedGradients
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.observer import observer


class GatherGradients:
    """What is in flight: gathers, and updates that wait for them."""

    sharded_gradients: ShardedGradients | None = None

    def __init__(
        self,
        layout: Layout,
        transport: BucketTransport,
        usage: Usage,
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
        self._updates: dict[SettleGroup, list[Callable[[], object]]] = defaultdict(list)

    def begin_backward(self) -> None:
        """All is settled."""

    def before_gradients(self) -> None:
        """Settle all, so that a gradient is accumulated onto the average of the earlier ones, as under DDP."""
        for group in self._layout.groups_to_gather():
            self.settle_value(group)

    def before_local_gradients(self) -> None:
        """As before others."""
        self.before_gradients()

    def behind_reduction(self, index: int) -> Sequence[Job]:
        """The gathers that the schedule puts behind this reduce-scatter."""
        return [self._gather(number) for number in self._layout.schedule.gathers_behind(index)]

    def _gather(self, index: int) -> Job:
        bucket = self._layout.buckets[index]
        assert bucket.reduce is not None
        bucket.gather = self._transport.gathering(bucket, after=(bucket.reduce,))
        return bucket.gather

    def keep(self, index: int) -> None:
        """The reduced shard stays in the bucket, from where it is gathered."""

    # Steps -------------------------------------------------------------------------------------------

    def stepped_by_another(self, optimizer: Optimizer) -> bool:
        """However many optimizers there are, gradients are gathered once."""
        del optimizer
        return False

    def before_step(
        self, states: Sequence[ParameterState], granularity: UpdateGranularity, *, scaled_by_amp: bool
    ) -> None:
        """Settle here and now what cannot wait, with all that shares a bucket with it.

        That is a second step without a backward, a loss scale that is about to vanish, a value that could be read
        without asking.
        """
        del granularity  # groups hold whole parameters
        pending = [state for state in states if state.phase.pending]
        aliased = set(looked_past(pending, self._layout.device))
        for state in pending:
            if state in aliased:
                self._condition.warn_of_aliases(state.name)
            if state.phase.pending and (state.phase.stepped or scaled_by_amp or state in aliased):
                self._settling.settle_value(self._layout.group_of[state])

    def takes(self, state: ParameterState, granularity: UpdateGranularity) -> bool:
        """Whether the step of ``state`` waits for its gradient."""
        del granularity
        return state.phase.pending

    def step(
        self,
        optimizer: Optimizer,
        hyper_parameters: Sequence[dict[str, Any]],
        states: Sequence[Sequence[ParameterState]],
    ) -> None:
        """Note the update of ``states`` (one sequence a parameter group) until their gradients have arrived."""
        by_group: dict[SettleGroup, list[list[torch.Tensor]]] = {}
        for index, members in enumerate(states):
            for state in members:
                lists = by_group.setdefault(self._layout.group_of[state], [[] for _ in states])
                lists[index].append(state.parameter)
                state.step()
        note_steps(state for members in states for state in members)
        self._condition.defer_work()
        lent = torch_private.tensors_in(list(hyper_parameters))
        for group, lists in by_group.items():
            groups = [{**h, "params": p} for h, p in zip(hyper_parameters, lists, strict=True) if p]
            stand_in = StandIn(optimizer, partial(list, groups))
            update = partial(torch_private.unhooked_step(type(optimizer)), stand_in)
            streams = self._transport.streams
            self._updates[group].append(streams.carry(update, [*lent, *stand_in.lent]))

    def state_wanted(self, optimizer: Optimizer) -> None:
        """Every rank has the whole state."""

    def state_replaced(self, optimizer: Optimizer) -> None:
        """Nothing is kept of the state."""

    def answer(self, request: Mapping[str, Any]) -> Reply:
        """There is nothing that other ranks do not get by themselves."""
        raise UnsupportedError(
            "gradients are gathered, yet a peer asked for them", got=str(request.get("want"))
        )

    def lose_states(self) -> None:
        """Every rank has the whole state."""

    def leave_states(self) -> None:
        """Every rank has the whole state."""

    @property
    def states_left(self) -> bool:
        """Every rank has the whole state."""
        return False

    def leave(self) -> None:
        """Nothing is kept."""

    # Settling ----------------------------------------------------------------------------------------

    def settle_gradient(self, group: SettleGroup) -> None:
        """Finish what is in flight: gradients and updates come together."""
        self.settle_value(group)

    def settle_value(self, group: SettleGroup) -> None:
        """Finish what is in flight for ``group``: averages into ``.grad``, due updates into parameters."""
        if not group.in_flight:
            return
        for bucket in group.buckets:
            assert bucket.gather is not None
            self._transport.wait(bucket.gather)
        start_ns = time.monotonic_ns()
        updates = self._updates.pop(group, [])
        with torch_private.without_user_modes(), group.acquire():
            replaced = [(state, state.grad) for state in group.states if state.phase.cleared]
            for state in group.states:
                if state.phase.cleared:
                    used = state.had_gradient or self._usage.anywhere(state)
                    state.grad = _average(state) if used else None
                elif state.phase.pending:
                    self._complete(state)
            self._run(updates, group)
            for state, gradient in replaced:
                state.grad = gradient
            for state in group.states:  # not before: other threads' uses are noticed until then
                state.release()
        group.in_flight = False
        if updates:
            observer().update(self._owner, group.buckets[0].index, start_ns, time.monotonic_ns())

    def _complete(self, state: ParameterState) -> None:
        gradient = state.grad
        if gradient is not None:
            copy_views([(gradient, view) for view in state.views])
        elif self._usage.anywhere(state):
            state.grad = _average(state, copy=True)

    def _run(self, updates: Sequence[Callable[[], object]], group: SettleGroup) -> None:
        try:
            for update in updates:
                update()
        except BaseException as error:  # an interrupted update cannot be told from a finished one
            self._condition.fail(
                f"the update of bucket {group.buckets[0].index} did not finish", type(error).__name__,
                "Restart the job from its last checkpoint.",
            )  # fmt: skip
            raise


def _average(state: ParameterState, *, copy: bool = False) -> torch.Tensor:
    """The averaged gradient, as its parameter lies in memory.

    Where it lies in the buckets like that it is what lies there, unless a ``copy`` is asked for.
    """
    views: list[BucketView] = state.views
    flat = views[0].flat if len(views) == 1 else torch.cat([v.flat for v in sorted(views, key=_start)])
    parameter = state.parameter
    with torch_private.without_subclass_dispatch():
        if parameter.is_contiguous():
            return flat.view(parameter.shape).to(parameter.device, copy=copy)
    average = laid_out_like(parameter, flat)
    flat_copy(average, 0, flat)
    return average


def _start(view: BucketView) -> int:
    return view.start
