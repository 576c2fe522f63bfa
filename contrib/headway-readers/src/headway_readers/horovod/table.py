"""A timeline's collectives, tensors and arrivals as columns, with steps and buckets, in absolute time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.ext import texts
from headway_readers.horovod.steps import number_steps
from headway_readers.horovod.timeline import NAMES, Timeline

_GRADIENTS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Columns over collectives; over requests, each a tensor of a collective; and over arrivals, each a rank's request.

    ``told`` counts the requests of a collective whose arrivals are told. ``bucket`` numbers a step's reductions.
    """

    name: Texts
    step: Ints
    start_ns: Ints
    end_ns: Ints
    complete_ns: Ints  # by then all ranks had asked for it
    size_bytes: Ints
    bucket: Ints
    algorithm: Texts
    told: Ints
    tensor: Texts
    request_collective: Ints
    arrival_request: Ints
    arrival_rank: Ints
    arrival_ns: Ints
    step_start_ns: Ints
    step_end_ns: Ints
    ranks: list[int]

    def __len__(self) -> int:
        return len(self.start_ns)

    def requests_of(self, rank: int) -> tuple[Ints, Ints]:
        """The requests of one rank, and when it made them. Arrivals are ordered by rank."""
        low, high = np.searchsorted(self.arrival_rank, [rank, rank + 1])
        return self.arrival_request[low:high], self.arrival_ns[low:high]

    def asked_ns(self, rank: int) -> Ints:
        """When one rank had asked for all of each collective; -1 where it took no part.

        Of a collective of which no arrival is told, this is when all had.
        """
        requests, arrival_ns = self.requests_of(rank)
        of = self.request_collective[requests]
        last_ns = np.full(len(self), -1, dtype=np.int64)
        np.maximum.at(last_ns, of, arrival_ns)
        all_of = np.bincount(of, minlength=len(self)) == self.told
        asked: Ints = np.where(self.told == 0, self.complete_ns, np.where(all_of, last_ns, -1))
        return asked


def tabulated(timeline: Timeline) -> Table:
    """The columns of a timeline that holds at least one collective."""
    each = timeline.collectives
    begin_ns = max(timeline.begin_ns, 0)
    requests = [(number, one) for number, collective in enumerate(each) for one in collective.requests]
    request_collective = _ints([number for number, _ in requests])
    arrivals = [
        (rank, number, time_ns)
        for number, (_, one) in enumerate(requests)
        for rank, time_ns in one.arrival_ns.items()
    ]
    arrivals.sort()
    arrival_rank, arrival_request = (_ints([arrival[column] for arrival in arrivals]) for column in (0, 1))
    arrival_ns = _noticed(_ints([arrival[2] for arrival in arrivals]), timeline)
    told = np.zeros(len(each), dtype=np.int64)
    np.add.at(told, request_collective[np.unique(arrival_request)], 1)
    name = texts([NAMES[one.kind] for one in each])
    start_ns, end_ns = _ints([one.start_ns for one in each]), _ints([one.end_ns for one in each])
    complete_ns = _ints([max(request.complete_ns for request in one.requests) for one in each])
    step = _ints(number_steps(each))
    step_start_ns, step_end_ns = _windows(
        step, end_ns, _first_ns(timeline, step == 0, request_collective[arrival_request], arrival_ns)
    )
    return Table(
        name=name,
        step=step,
        start_ns=start_ns + begin_ns,
        end_ns=end_ns + begin_ns,
        complete_ns=np.where(complete_ns >= 0, np.minimum(complete_ns, start_ns), start_ns) + begin_ns,
        size_bytes=_ints([_sum([request.size_bytes for request in one.requests]) for one in each]),
        bucket=_buckets(step, np.isin(name, _GRADIENTS) & (step >= 0)),
        algorithm=texts([next((r.backend for r in one.requests if r.backend), "") for one in each]),
        told=told,
        tensor=texts([one.tensor for _, one in requests]),
        request_collective=request_collective,
        arrival_request=arrival_request,
        arrival_rank=arrival_rank,
        arrival_ns=arrival_ns + begin_ns,
        step_start_ns=step_start_ns + begin_ns,
        step_end_ns=step_end_ns + begin_ns,
        ranks=sorted({0, *np.unique(arrival_rank).tolist()}),
    )


def _noticed(times_ns: Ints, timeline: Timeline) -> Ints:
    """When the cycles began in which requests were noticed: rank 0 notes its own before it hears of others'."""
    cycles_ns = timeline.cycles_ns
    if not len(cycles_ns):
        return times_ns
    index = np.searchsorted(cycles_ns, times_ns, side="right") - 1
    noticed: Ints = np.where(index >= 0, cycles_ns[index], times_ns)
    return noticed


def _first_ns(
    timeline: Timeline, first: npt.NDArray[np.bool_], arrival_collective: Ints, arrival_ns: Ints
) -> int:
    """When the ``first`` of the collectives, which are those of the first step, were first asked for."""
    known: list[int] = [
        one.negotiated_ns if one.negotiated_ns >= 0 else one.start_ns
        for number in np.flatnonzero(first).tolist()
        for one in timeline.collectives[number].requests
    ]
    arrived: list[int] = arrival_ns[first[arrival_collective]].tolist()
    return min([*known, *arrived])


def _windows(step: Ints, end_ns: Ints, first_ns: int) -> tuple[Ints, Ints]:
    """Steps from the end of the one before to the end of their last collective."""
    ends = np.zeros(int(step.max()) + 1, dtype=np.int64)
    np.maximum.at(ends, step[step >= 0], end_ns[step >= 0])
    ends = np.maximum.accumulate(ends)
    return np.concatenate([[first_ns], ends[:-1]]), ends


def _buckets(step: Ints, counted: npt.NDArray[np.bool_]) -> Ints:
    """Number each step's reductions from 0; -1 stands for what is none. Collectives are ordered by step."""
    bucket = np.full(len(step), -1, dtype=np.int64)
    own = step[counted]
    bucket[counted] = np.arange(len(own)) - np.searchsorted(own, own)
    return bucket


def _sum(sizes: list[int]) -> int:
    total = sum(sizes)
    return total if min(sizes) >= 0 and total < 2**62 else -1


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
