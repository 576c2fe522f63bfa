"""The parameters, buckets and groups of buckets under one schedule, and which parameters were used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from headway.scheduling.buckets import BucketSchedule
from headway.strategies.decoupled.buckets import BucketView, LiveBucket
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job
from headway.strategies.live.channels.wiring import Wiring


class SettleGroup:
    """Buckets that are settled together because they share parameters; most groups are one bucket."""

    def __init__(self, buckets: Sequence[LiveBucket], states: Sequence[ParameterState]) -> None:
        self.buckets, self.states = buckets, states
        self.in_flight = False
        self.stepped = False  # with parameters gathered: an update is in flight

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Use the buffer of every bucket."""
        with ExitStack() as fences:
            for bucket in self.buckets:
                fences.enter_context(bucket.fence.acquire())
            yield


class Layout:
    """What a schedule makes of some parameters. ``schedule`` is the one in force; it may come to gather gradients."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        schedule: BucketSchedule,
        world_size: int,
        rank: int,
        wiring: Wiring,
    ) -> None:
        self.schedule = schedule
        self.device = wiring.device
        self.buckets = [LiveBucket(planned, world_size, rank, wiring) for planned in schedule.buckets]
        by_name = {name: ParameterState(name, parameters[name]) for name in schedule.buckets_of}
        self.states = list(by_name.values())
        self.states_in = [[by_name[name] for name in bucket.parameters] for bucket in schedule.buckets]
        for planned, bucket in zip(schedule.buckets, self.buckets, strict=True):
            offset = 0
            for part in planned.parts:
                state = by_name[part.parameter]
                state.views.append(BucketView(bucket, state.parameter, part.start, part.end, offset))
                offset += part.numel
        self.groups = [self._group(indices) for indices in schedule.units]
        self.group_of = {state: group for group in self.groups for state in group.states}
        of_bucket = {bucket.index: group for group in self.groups for bucket in group.buckets}
        self.group_at = [of_bucket[bucket.index] for bucket in self.buckets]

    def _group(self, indices: Sequence[int]) -> SettleGroup:
        states = dict.fromkeys(state for index in indices for state in self.states_in[index])
        return SettleGroup([self.buckets[index] for index in indices], list(states))

    def groups_to_gather(self) -> Iterator[SettleGroup]:
        """The group of every bucket, in gather order: that of several buckets comes up for each."""
        return (self.group_at[index] for index in self.schedule.gather_order)


class Usage:
    """One backward's uses of ``states``. Ranks tell each other only where parameters may go unused."""

    def __init__(self, states: Sequence[ParameterState], transport: BucketTransport) -> None:
        self._transport = transport
        self._index = {state: index for index, state in enumerate(states)}
        self._used: set[ParameterState] = set()
        self._counts: torch.Tensor | None = None
        self._job: Job | None = None

    def restart(self) -> None:
        """A new backward begins."""
        self._used.clear()
        self._job = None

    def used(self, state: ParameterState) -> bool:
        """Note a gradient; whether it is the parameter's first in this backward."""
        first = state not in self._used
        self._used.add(state)
        return first

    def unused(self) -> list[ParameterState]:
        """The parameters without a gradient on this rank."""
        return [state for state in self._index if state not in self._used]

    def unused_names(self) -> list[str]:
        """Their names."""
        return [state.name for state in self.unused()]

    def share(self) -> None:
        """Queue the exchange of uses, behind the backward's reduce-scatters."""
        # As under DDP, what was used in an earlier backward that was not reduced counts as well.
        used = [state in self._used or state.grad is not None for state in self._index]
        self._counts = torch.tensor(used, dtype=torch.int32, device="cpu")
        self._job = self._transport.submit(self._transport.all_reduce(self._counts))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What has to be done before ``anywhere`` can answer."""
        return () if self._job is None else (self._job,)

    def anywhere(self, state: ParameterState) -> bool:
        """Whether any rank used the parameter; waits for the exchange where there is one.

        Raises CommunicationError where it failed.
        """
        if self._job is None:
            return True
        self._transport.wait(self._job)
        assert self._counts is not None
        return bool(self._counts[self._index[state]])
