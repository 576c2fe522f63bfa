"""The group generators, by name: rules that draw groups of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from headway import files
from headway.errors import PlanError
from headway.strategies.partial_all_reduce.generators.attendance import Attendance, Count, State
from headway.strategies.partial_all_reduce.generators.generator import (
    DrawingOptions,
    FirstComeOptions,
    GeneratorOptions,
    GroupGenerator,
    PairOptions,
    SizeOptions,
    Worker,
)
from headway.strategies.partial_all_reduce.generators.queues import Mixing, QueuedGroups, divided


class RandomGroups(QueuedGroups[SizeOptions]):
    """A worker without a group draws others without one, so queued groups never share a worker.

    If none are left, it continues alone.
    """

    name: ClassVar[str] = "random"

    def _draw(self, worker: Worker) -> Iterator[Sequence[Worker]]:
        candidates = [
            candidate
            for candidate in sorted(self.present)
            if candidate != worker and self._has_none(candidate)
        ]
        yield (worker, *self.chance.sample(candidates, self.options.group_size - 1))


class Everyone(Attendance[GeneratorOptions]):
    """One group of all workers, once all of them wait, including those that join meanwhile."""

    name: ClassVar[str] = "all"

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        del now_ns
        if self.present and all(map(self._is_ready, self.present)):
            yield tuple(self.present)


class Pairs(QueuedGroups[PairOptions]):
    """A worker without a partner draws a neighbour and averages with it once that one arrives.

    Neighbours are all others, or as in AD-PSGD the workers of the other half, so that requests form no cycle (here the
    single queue rules that out too). AD-PSGD's passive half answers at any time; here both average between iterations.
    A worker without neighbours draws any worker, or continues alone.
    """

    name: ClassVar[str] = "pairs"

    def _draw(self, worker: Worker) -> Iterator[Sequence[Worker]]:
        candidates = sorted(self.present - {worker})
        if self.options.neighbours == "bipartite":
            candidates = [candidate for candidate in candidates if (candidate - worker) % 2] or candidates
        yield (worker, *self.chance.sample(candidates, 1))


class GlobalDivision(QueuedGroups[DrawingOptions]):
    """A worker without a group divides all workers without one into disjoint groups.

    If it is the only one, it draws any others, as ``GroupBuffer`` does, rather than training alone.
    """

    name: ClassVar[str] = "global-division"

    def _draw(self, worker: Worker) -> Iterable[Iterable[Worker]]:
        size = self.options.group_size
        candidates = self._without_slow(worker, self.present)
        without = [candidate for candidate in candidates if self._has_none(candidate)]
        if not without:
            return [(worker, *self.chance.sample(candidates, size - 1))]
        return divided(self.chance.sample((worker, *without), len(without) + 1), size)


class GroupBuffer(QueuedGroups[DrawingOptions]):
    """A worker without a group draws any others; those with queued groups join this one afterwards."""

    name: ClassVar[str] = "group-buffer"

    def _draw(self, worker: Worker) -> Iterator[Sequence[Worker]]:
        candidates = self._without_slow(worker, self.present)
        yield (worker, *self.chance.sample(candidates, self.options.group_size - 1))


class InterIntra(QueuedGroups[DrawingOptions]):
    """A worker without a group draws two rounds for all workers without one.

    In the first, a random head of each host averages with other heads, in groups of ``group_size`` hosts, and the other
    workers of a host average among themselves. In the second, each host averages as a whole. If only workers of one host
    have no group, a random other host sends a head too, since hosts of different speeds would not meet otherwise.

    A slow worker, which most others leave out, draws only one group, with its host: in a second round its whole host
    would wait for another of its iterations.
    """

    name: ClassVar[str] = "inter-intra"

    def _draw(self, worker: Worker) -> Iterable[Iterable[Worker]]:
        candidates = self._without_slow(worker, self.present)
        if self._is_slow(worker):
            return [self._one_group(worker, candidates)]
        hosts = self._by_host([worker, *candidates])
        without = self._by_host([worker, *filter(self._has_none, candidates)])
        if len(hosts) == 1:
            return hosts.values()
        return self._two_rounds(hosts, without)

    def _one_group(self, worker: Worker, candidates: list[Worker]) -> Iterable[Worker]:
        near = [candidate for candidate in candidates if self._host_of(candidate) == self._host_of(worker)]
        return [worker, *(near or self.chance.sample(candidates, self.options.group_size - 1))]

    def _two_rounds(
        self, hosts: Mapping[str, list[Worker]], without: Mapping[str, list[Worker]]
    ) -> Iterator[Iterable[Worker]]:
        meeting = list(without)
        if len(meeting) == 1:
            meeting += self.chance.sample((host for host in hosts if host not in without), 1)
        heads = {host: self.chance.pick(without.get(host, hosts[host])) for host in meeting}
        yield from divided(self.chance.sample(heads.values(), len(heads)), self.options.group_size)
        for host, workers in without.items():
            yield [worker for worker in workers if worker != heads[host]]
        yield from (hosts[host] for host in without if len(hosts[host]) > 1)

    def _by_host(self, workers: Iterable[Worker]) -> dict[str, list[Worker]]:
        by_host: dict[str, list[Worker]] = {}
        for worker in sorted(workers):
            by_host.setdefault(self._host_of(worker), []).append(worker)
        return dict(sorted(by_host.items()))

    def _host_of(self, worker: Worker) -> str:
        return self.hosts.get(worker, f"\0{worker}")


SMOOTHING = 8  # arrivals over which the mean time between two is taken


class FirstComeState(State):
    """State of ``FirstCome``: time of the last arrival, mean time between arrivals, and recent groups."""

    last_ask_ns: int | None
    mean_gap_ns: int | None
    recent: dict[Count, tuple[tuple[Count, ...], ...]]


class FirstCome(Attendance[FirstComeOptions]):
    """A group begins when ``group_size`` workers wait, or when the first of them has waited for the deadline.

    No worker waits for a straggler. The deadline is ``patience`` times the time that a group takes to fill, at the
    moving average of times between arrivals. Two rules prevent update isolation, in which some workers average only with
    each other. Groups prefer workers that have not mixed recently. And if all waiting workers belong to one part of the
    recent groups (``Mixing``), the first of them waits beyond its deadline for a worker of another part; its peers do
    not.
    """

    name: ClassVar[str] = "first-come"
    state_class: ClassVar[type[State]] = FirstComeState

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_ask_ns: int | None = None
        self._mean_gap_ns: int | None = None
        self._mixing = Mixing(self.options.mixing_window)

    @property
    def deadline_ns(self) -> int:
        """How long the first waiting worker currently waits."""
        options = self.options
        if options.deadline_ms is not None:
            return round(options.deadline_ms * 1e6)
        least_ns, most_ns = round(options.least_ms * 1e6), round(options.most_ms * 1e6)
        if self._mean_gap_ns is None:
            return most_ns
        fills_ns = self._mean_gap_ns * (options.group_size - 1)
        return min(max(round(options.patience * fills_ns), least_ns), most_ns)

    @property
    def wake_ns(self) -> int | None:
        """Deadline of the first worker that does not wait for another part."""
        candidates = self._candidates()
        return self.waiting[candidates[0]] + self.deadline_ns if candidates else None

    def _on_ask(self, worker: Worker, now_ns: int) -> None:
        if self._last_ask_ns is not None:
            gap_ns, mean_ns = now_ns - self._last_ask_ns, self._mean_gap_ns
            self._mean_gap_ns = gap_ns if mean_ns is None else mean_ns + (gap_ns - mean_ns) // SMOOTHING
        self._last_ask_ns = now_ns

    def _on_leave(self, worker: Worker) -> None:
        self._mixing.left(worker)

    def _on_grant(self, members: tuple[Worker, ...]) -> None:
        self._mixing.granted(members)

    def _drawn_now(self, now_ns: int) -> Iterator[Sequence[Worker]]:
        while candidates := self._candidates():
            others_may_come = len(self.waiting) < len(self.present)
            full = len(candidates) >= self.options.group_size or not others_may_come
            if not full and now_ns < self.waiting[candidates[0]] + self.deadline_ns:
                return
            yield self._chosen(candidates)

    def _candidates(self) -> list[Worker]:
        """Waiting workers in order of arrival, without one that waits for another part."""
        ready = list(filter(self._is_ready, self.waiting))
        if not ready or not self._mixing.has_full_window(ready[0]):
            return ready
        outside = self._mixing.parts(self.present).outside(ready[0])
        if not outside or any(worker in ready for worker in outside):
            return ready
        return ready[1:]

    def _chosen(self, candidates: Sequence[Worker]) -> list[Worker]:
        """Choose the first candidate, then preferably workers of parts that are not in the group yet."""
        parts = self._mixing.parts(self.present)
        chosen, left = [candidates[0]], list(candidates[1:])
        while left and len(chosen) < self.options.group_size:
            inside = {parts.of(worker) for worker in chosen}
            following = next((worker for worker in left if parts.of(worker) not in inside), left[0])
            left.remove(following)
            chosen.append(following)
        return chosen

    def _snapshot(self) -> dict[str, Any]:
        return {
            **super()._snapshot(),
            "last_ask_ns": self._last_ask_ns,
            "mean_gap_ns": self._mean_gap_ns,
            "recent": dict(self._mixing.recent),
        }

    def _take(self, state: Any) -> None:
        super()._take(state)
        self._last_ask_ns, self._mean_gap_ns = state.last_ask_ns, state.mean_gap_ns
        self._mixing.recent = dict(state.recent)


GENERATORS: Mapping[str, tuple[type[Attendance[Any]], type[GeneratorOptions]]] = MappingProxyType(
    {
        FirstCome.name: (FirstCome, FirstComeOptions),
        GlobalDivision.name: (GlobalDivision, DrawingOptions),
        InterIntra.name: (InterIntra, DrawingOptions),
        GroupBuffer.name: (GroupBuffer, DrawingOptions),
        RandomGroups.name: (RandomGroups, SizeOptions),
        Pairs.name: (Pairs, PairOptions),
        Everyone.name: (Everyone, GeneratorOptions),
    }
)


def names() -> tuple[str, ...]:
    """Names of all generators."""
    return tuple(GENERATORS)


def options_of(name: str, options: Mapping[str, Any]) -> GeneratorOptions:
    """Validate ``options`` of the generator ``name``. Raises PlanError for an unknown name or option."""
    if name not in GENERATORS:
        raise PlanError("unknown group generator", got=repr(name), expected=" or ".join(GENERATORS))
    return files.validate(dict(options), GENERATORS[name][1], PlanError, f"groups {name}")


def generator_of(
    name: str, options: Mapping[str, Any], hosts: Mapping[Worker, str], seed: int
) -> GroupGenerator:
    """Create a generator without workers; ``hosts`` maps workers to hosts and may grow.

    A worker that is not in ``hosts`` counts as being on its own host. Raises PlanError as ``options_of`` does.
    """
    validated = options_of(name, options)
    return GENERATORS[name][0](validated, hosts, seed)
