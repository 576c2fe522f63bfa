"""Form (a): gradients are gathered, and every rank runs the whole optimizer, a unit at a time, when forward needs it.

The gathers stand behind the reduce-scatters of the same backward. So a step, a read or a further backward only ever
waits for what is queued, and a read on one rank alone can neither mix up collectives nor wait for something that other
ranks have yet to decide.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from headway import torch_private
from headway.collectives.algorithms import ALL_GATHER
from headway.errors import UnsupportedError
from headway.strategies.data_parallel.channels.observer import observer
from headway.strategies.data_parallel.decoupled.bucket import BucketView, SettleGroup
from headway.strategies.data_parallel.decoupled.copying import copy_views
from headway.strategies.data_parallel.decoupled.engine import Engine
from headway.strategies.data_parallel.decoupled.granularity import UpdateGranularity
from headway.strategies.data_parallel.decoupled.messages import Reply
from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState, looked_past, note_steps
from headway.strategies.data_parallel.decoupled.stand_in import StandIn

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.sharded_gradients import ShardedGradients


class GatherGradients:
    """What is under way: gathers, and updates that wait for them."""

    sharded_gradients: ShardedGradients | None = None

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._updates: dict[SettleGroup, list[Callable[[], object]]] = defaultdict(list)

    def begin_backward(self) -> None:
        """All is settled."""

    def before_gradients(self) -> None:
        """Settle all, so that a gradient is accumulated onto the average of the earlier ones, as under DDP."""
        for index in self._engine.schedule.gather_order:
            self.settle_value(self._engine.buckets[index].unit)

    def before_local_gradients(self) -> None:
        """As before others."""
        self.before_gradients()

    def reduced(self, index: int) -> None:
        """Queue the gathers that the schedule puts behind this reduce-scatter."""
        for number in self._engine.schedule.gathers_behind(index):
            bucket = self._engine.buckets[number]
            assert bucket.reduce is not None
            bucket.gather = self._engine.collective(ALL_GATHER, bucket, after=(bucket.reduce,))

    def keep(self, index: int) -> None:
        """The reduced shard stays in the bucket, from where it is gathered."""

    # Steps -------------------------------------------------------------------------------------------

    def stepped_by_another(self, optimizer: Optimizer) -> bool:
        """However many optimizers there are, gradients are gathered once."""
        del optimizer
        return False

    def before_step(
        self, slots: Sequence[ParameterState], granularity: UpdateGranularity, *, scaled_by_amp: bool
    ) -> None:
        """Settle here and now what cannot wait, with all that shares a bucket with it.

        That is a second step without a backward, a loss scale that is about to vanish, a value that could be read
        without asking.
        """
        del granularity  # units hold whole parameters
        pending = [slot for slot in slots if slot.pending]
        aliased = set(looked_past(pending, self._engine.wiring.device))
        for slot in pending:
            if slot in aliased:
                self._engine.warn_of_aliases(slot.name)
            if slot.pending and (slot.stepped or scaled_by_amp or slot in aliased):
                self._engine.settle_value(slot.unit)

    def takes(self, slot: ParameterState, granularity: UpdateGranularity) -> bool:
        """Whether the step of ``slot`` waits for its gradient."""
        del granularity
        return slot.pending

    def step(
        self,
        optimizer: Optimizer,
        hyper_parameters: Sequence[dict[str, Any]],
        slots: Sequence[Sequence[ParameterState]],
    ) -> None:
        """Note the update of ``slots`` (one sequence a parameter group) until their gradients have arrived."""
        by_unit: dict[SettleGroup, list[list[torch.Tensor]]] = {}
        for index, group in enumerate(slots):
            for slot in group:
                lists = by_unit.setdefault(slot.unit, [[] for _ in slots])
                lists[index].append(slot.parameter)
                slot.step()
        note_steps(slot for group in slots for slot in group)
        self._engine.unsettle()
        lent = torch_private.tensors_in(list(hyper_parameters))
        for unit, lists in by_unit.items():
            groups = [{**h, "params": p} for h, p in zip(hyper_parameters, lists, strict=True) if p]
            stand_in = StandIn(optimizer, partial(list, groups))
            update = partial(torch_private.unhooked_step(type(optimizer)), stand_in)
            streams = self._engine.wiring.streams
            self._updates[unit].append(streams.carry(update, [*lent, *stand_in.lent]))

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

    def settle_gradient(self, unit: SettleGroup) -> None:
        """Finish what is under way: gradients and updates come together."""
        self.settle_value(unit)

    def settle_value(self, unit: SettleGroup) -> None:
        """Finish what is under way for ``unit``: averages into ``.grad``, due updates into parameters."""
        if not unit.in_flight:
            return
        for bucket in unit.buckets:
            assert bucket.gather is not None
            self._engine.wait(bucket.gather)
        start_ns = time.monotonic_ns()
        unit.in_flight = False
        updates = self._updates.pop(unit, [])
        with torch_private.without_user_modes(), unit.acquire():
            replaced = [(slot, slot.grad) for slot in unit.slots if slot.cleared]
            for slot in unit.slots:
                if slot.cleared:
                    used = slot.defined or self._engine.usage.anywhere(slot)
                    slot.grad = _average(slot).to(slot.parameter.device) if used else None
                elif slot.pending:
                    self._complete(slot)
                slot.leave()
            self._run(updates, unit)
            for slot, gradient in replaced:
                slot.parameter.grad = gradient
        if updates:
            observer().update(self._engine, unit.buckets[0].index, start_ns, time.monotonic_ns())

    def _complete(self, slot: ParameterState) -> None:
        gradient = slot.grad
        if gradient is not None:
            copy_views([(gradient, place) for place in slot.places])
        elif self._engine.usage.anywhere(slot):
            slot.grad = _average(slot).to(slot.parameter.device, copy=True)

    def _run(self, updates: Sequence[Callable[[], object]], unit: SettleGroup) -> None:
        try:
            for update in updates:
                update()
        except BaseException as error:  # an interrupted update cannot be told from a finished one
            self._engine.fail(
                f"the update of bucket {unit.buckets[0].index} did not finish", type(error).__name__,
                "Restart the job from its last checkpoint.",
            )  # fmt: skip
            raise


def _average(slot: ParameterState) -> torch.Tensor:
    """The averaged gradient as it lies in the buckets, copied together where it lies in several."""
    places: list[BucketView] = slot.places
    flat = places[0].view if len(places) == 1 else torch.cat([p.view for p in sorted(places, key=_start)])
    return flat.view(slot.parameter.shape)


def _start(place: BucketView) -> int:
    return place.start
