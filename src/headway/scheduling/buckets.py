"""Bucket schedules: which gradients share a collective, and the order in which collectives are issued."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headway.collectives.algorithms import ALL_REDUCE, REDUCE_SCATTER
from headway.collectives.selection import RINGS, Algorithms
from headway.collectives.servers import EVENLY, Serving
from headway.compression.cast import Cast
from headway.compression.codec import FLOATS, Codec, Exchange
from headway.errors import PlanError
from headway.model import DTYPE_BYTES, ModelSpec, ParameterSpec
from headway.plugins import asking
from headway.units import counted

GatherMode = Literal["parameters", "gradients"]
GATHER_MODES: tuple[GatherMode, ...] = ("parameters", "gradients")


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``end`` of one flattened parameter."""

    parameter: str
    start: int
    end: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parts of parameters of one dtype whose gradients share a collective.

    With a codec ``wire``, they are sent in the collectives ``exchanges``; otherwise uncompressed.
    """

    index: int
    parts: tuple[Part, ...]
    dtype: str
    size_bytes: int
    wire: Codec | None = None
    exchanges: tuple[Exchange, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """The size of the tensors that are sent, over all ranks (``compression.codec.Exchange``)."""
        return sum(exchange.size_bytes for exchange in self.exchanges) if self.exchanges else self.size_bytes

    @property
    def all_reduced_bytes(self) -> float:
        """The size of the tensor whose all-reduce would move as many bytes; a gather or exchange counts half."""
        if not self.exchanges:
            return self.size_bytes
        return sum(e.size_bytes * (1 if e.kind == ALL_REDUCE else 0.5) for e in self.exchanges)

    @property
    def collectives(self) -> int:
        """The number of collectives."""
        return len(self.exchanges) or 1

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that have a part in the bucket, in order."""
        return tuple(dict.fromkeys(part.parameter for part in self.parts))


@dataclass(frozen=True, slots=True)
class BucketSchedule:
    """Buckets in the order of their reduction, and the order of their gathers.

    ``gather_order`` holds bucket indices in the order in which the next forward needs them; it is empty if the
    collective leaves every rank with the whole result. ``gather`` is what is gathered: gradients, right after the
    reduce-scatters, or parameters, after the step of an optimizer with sharded state. Up to ``channels`` collectives are
    in flight. With gradients, gather ``i`` may start after reduce-scatter ``gathers_after[i]``; if that is empty, all
    start after the last one. ``algorithms`` carry out the two halves, for which gradients are cast to ``halves``.
    ``serving`` is how servers share the work.
    """

    buckets: tuple[Bucket, ...]
    gather_order: tuple[int, ...] = ()
    gather: GatherMode = "gradients"
    channels: int = 1
    gathers_after: tuple[int, ...] = ()
    algorithms: Algorithms = RINGS
    halves: Cast | None = None
    serving: Serving = EVENLY

    def cast_in(self, kind: str) -> Cast | None:
        """The cast of a half ``kind``; parameters are never cast."""
        return self.halves if kind == REDUCE_SCATTER or self.gather == "gradients" else None

    def half_bytes(self, kind: str, bucket: Bucket) -> int:
        """The size of the tensor of a half ``kind`` of ``bucket``."""
        cast = self.cast_in(kind)
        if cast is None:
            return bucket.size_bytes
        return bucket.size_bytes // DTYPE_BYTES[bucket.dtype] * DTYPE_BYTES[cast.dtype]

    @property
    def parts(self) -> str:
        """The parts of a step's communication, in words."""
        return counted(len(self.buckets), "bucket")

    @property
    def collectives(self) -> int:
        """The number of collectives per step, counting two halves once: fewer mean less risk."""
        return sum(bucket.collectives for bucket in self.buckets)

    @property
    def buckets_of(self) -> dict[str, tuple[int, ...]]:
        """The indices of the buckets that hold a part of each parameter."""
        indices_of: dict[str, list[int]] = defaultdict(list)
        for bucket in self.buckets:
            for name in bucket.parameters:
                indices_of[name].append(bucket.index)
        return {name: tuple(indices) for name, indices in indices_of.items()}

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The groups of buckets that complete together, because they share parameters directly or indirectly."""
        return joined([bucket.parameters for bucket in self.buckets])

    def gathers_behind(self, index: int) -> tuple[int, ...]:
        """The buckets whose gathers are queued right after reduce-scatter ``index``; none if parameters are gathered."""
        return tuple(self.gathers_behind_each()[index])

    def gathers_behind_each(self) -> list[list[int]]:
        """``gathers_behind`` of every bucket."""
        behind: list[list[int]] = [[] for _ in self.buckets]
        if self.gather == "gradients" and self.buckets:
            last = len(self.buckets) - 1
            after = self.gathers_after or (last,) * len(self.gather_order)
            for gathered, index in zip(self.gather_order, after, strict=True):
                behind[index].append(gathered)
        return behind


def joined(holdings: Sequence[Iterable[str]]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of ``holdings`` that share names, directly or indirectly (connected components).

    Groups are in the order of their first index.
    """
    leader = list(range(len(holdings)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    holder: dict[str, int] = {}
    for index, names in enumerate(holdings):
        for name in names:
            first, second = find(holder.setdefault(name, index)), find(index)
            leader[max(first, second)] = min(first, second)
    units: dict[int, list[int]] = {}
    for index in range(len(holdings)):
        units.setdefault(find(index), []).append(index)
    return tuple(tuple(unit) for unit in units.values())


def channel_of(number: int, channels: int) -> int:
    """The channel, of ``channels``, that carries collective ``number``: they take turns."""
    return number % channels


def earlier_on_channel(number: int, channels: int) -> int | None:
    """The collective that the channel of ``number`` carries before it; None for its first one."""
    return number - channels if number >= channels else None


def whole_parameter(parameter: ParameterSpec) -> Part:
    """The part that covers a whole parameter."""
    return Part(parameter.name, 0, parameter.numel)


def make_buckets(groups: Iterable[Sequence[Part]], model: ModelSpec) -> tuple[Bucket, ...]:
    """Number ``groups`` of parts of ``model``'s parameters; each group must be of one dtype and not empty."""
    buckets = []
    for index, group in enumerate(groups):
        dtype = model.by_name[group[0].parameter].dtype
        size_bytes = sum(part.numel for part in group) * DTYPE_BYTES[dtype]
        buckets.append(Bucket(index, tuple(group), dtype, size_bytes))
    return tuple(buckets)


def sent_as(bucket: Bucket, codec: Codec | None, model: ModelSpec, world_size: int) -> Bucket:
    """``bucket`` with its gradients encoded by ``codec``. Raises PlanError for dtypes other than floating point."""
    if codec is None:
        return bucket
    if bucket.dtype not in FLOATS:
        raise PlanError(
            "only floating-point gradients can be cast or compressed",
            got=f"{bucket.dtype}: {bucket.parts[0].parameter}",
            expected=" or ".join(FLOATS),
        )
    shapes = [
        model.by_name[part.parameter].shape
        if part == whole_parameter(model.by_name[part.parameter])
        else (part.numel,)
        for part in bucket.parts
    ]
    with asking("codec", codec):
        exchanges = tuple(codec.exchanges(shapes, bucket.dtype, world_size))
    return replace(bucket, wire=codec, exchanges=exchanges)


def group_by_size(parameters: Sequence[ParameterSpec], cap_bytes: int) -> list[list[ParameterSpec]]:
    """Group consecutive ``parameters`` of one dtype into runs of at most ``cap_bytes``.

    Only a single parameter that exceeds the cap makes a larger run.
    """
    groups: list[list[ParameterSpec]] = []
    size_bytes = 0
    for parameter in parameters:
        fits = (
            groups
            and groups[-1][0].dtype == parameter.dtype
            and size_bytes + parameter.size_bytes <= cap_bytes
        )
        if fits:
            groups[-1].append(parameter)
            size_bytes += parameter.size_bytes
        else:
            groups.append([parameter])
            size_bytes = parameter.size_bytes
    return groups


def forward_gather_order(model: ModelSpec, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Bucket indices by the first of their parameters that forward needs."""
    position = {parameter.name: index for index, parameter in enumerate(model.forward_parameters())}
    first_use = {bucket.index: min(position[name] for name in bucket.parameters) for bucket in buckets}
    return tuple(sorted(first_use, key=lambda index: (first_use[index], index)))


def restricted(schedule: BucketSchedule, model: ModelSpec) -> BucketSchedule:
    """Adapt ``schedule`` to another set of trainable parameters: drops frozen ones, puts new ones in front.

    Gathers follow forward order, after the last reduce-scatter.
    """
    bucketed = schedule.buckets_of
    groups = [[p for p in bucket.parts if p.parameter in model.by_name] for bucket in schedule.buckets]
    new = [parameter for parameter in model.ready_parameters() if parameter.name not in bucketed]
    largest = max((bucket.size_bytes for bucket in schedule.buckets), default=1)
    runs = [[whole_parameter(parameter) for parameter in run] for run in group_by_size(new, largest)]
    buckets = make_buckets([*runs, *(group for group in groups if group)], model)
    return BucketSchedule(
        buckets=buckets,
        gather_order=forward_gather_order(model, buckets),
        gather=schedule.gather,
        channels=schedule.channels,
        algorithms=schedule.algorithms,
        halves=schedule.halves,
    )


class BucketReadiness:
    """Counts ready gradients in a backward: a bucket launches when it and all buckets before it are full."""

    def __init__(self, schedule: BucketSchedule) -> None:
        self._buckets_of = schedule.buckets_of
        self._full = [len(bucket.parameters) for bucket in schedule.buckets]
        self._missing = list(self._full)
        self.next = 0

    def ready(self, parameter: str) -> range:
        """Note that the gradient of ``parameter`` is complete; returns the indices of buckets to launch now."""
        for index in self._buckets_of.get(parameter, ()):
            self._missing[index] -= 1
        begin = self.next
        while self.next < len(self._missing) and self._missing[self.next] <= 0:
            self.next += 1
        return range(begin, self.next)

    @property
    def complete(self) -> bool:
        """Whether every bucket has been launched."""
        return self.next == len(self._missing)

    def restart(self) -> None:
        """Start counting again, for the next backward."""
        self._missing = list(self._full)
        self.next = 0
