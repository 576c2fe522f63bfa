"""Hierarchical collectives: rings within hosts and rings across them, as chunk programs.

Local rank ``l`` is the ``l``-th rank of its host. The reduce-scatter first reduces within each host, in a ring of its
ranks, so that local rank ``l`` has its host's sum of the chunks owned by the ``l``-th ranks of all hosts. They then
reduce their sums in a ring across hosts. The all-gather does the reverse. A rank sends and receives ``world_size - 1``
chunks each way, as in one ring of all ranks, but only ``hosts - 1`` of them cross between hosts: each host's link carries
``(hosts - 1) / hosts`` of the tensor instead of ``(world_size - 1) / world_size``, in ``hosts - 1`` rounds.

All hosts have the same number of ranks. With one host, or one rank per host, this is the ring of all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from headway.cluster import Cluster
from headway.collectives.program import LOOKAHEAD_ROUNDS, ChunkProgram, Step, owned_chunk
from headway.errors import PlanError

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks of each host; hosts are sorted by their first rank."""

    ranks: tuple[Ranks, ...]

    @classmethod
    def of_places(cls, places: Sequence[Hashable]) -> Hosts:
        """Group ranks by the place (host) of each rank."""
        by_place: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            by_place.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, by_place.values())))

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Hosts:
        """The hosts of a cluster."""
        return cls.of_places(cluster.host_of_rank)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.ranks))

    @property
    def are_alike(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(map(len, self.ranks))) == 1

    @property
    def in_rank_order(self) -> bool:
        """Whether ranks are numbered consecutively host by host."""
        listed = [rank for ranks in self.ranks for rank in ranks]
        return listed == list(range(len(listed)))

    def number_of(self, rank: int) -> int:
        """The index of the host of ``rank``."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_of(self, numbers: Sequence[int]) -> Ranks:
        """The ranks of some hosts, sorted."""
        return tuple(sorted(rank for number in numbers for rank in self.ranks[number]))


def check_alike(hosts: Hosts) -> None:
    """Raise PlanError unless all hosts have the same number of ranks."""
    if not hosts.are_alike:
        raise PlanError(
            "hierarchical collectives need the same number of workers on every host",
            got=f"hosts with {', '.join(map(str, sorted({len(ranks) for ranks in hosts.ranks})))} workers",
            expected="equally many on every host",
            fix="Use the ring.",
        )


def differs_from_rings(hosts: Hosts) -> bool:
    """Whether hierarchical collectives work on ``hosts`` and differ from the ring of all ranks."""
    return hosts.are_alike and len(hosts.ranks) > 1 and len(hosts.ranks[0]) > 1


@lru_cache(maxsize=4096)
def hierarchical_reduce_scatter(rank: int, world_size: int, pieces: int = 1, *, hosts: Hosts) -> ChunkProgram:
    """Reduce within the host, then across; the own chunk is complete at the end.

    Raises PlanError if hosts have different numbers of ranks.
    """
    place = _Place.of(rank, world_size, hosts)
    return place.program("hierarchical_reduce_scatter", place.scatter(pieces), pieces)


@lru_cache(maxsize=4096)
def hierarchical_all_gather(rank: int, world_size: int, pieces: int = 1, *, hosts: Hosts) -> ChunkProgram:
    """Gather across hosts, then within them. All receives are posted at the beginning.

    Raises PlanError if hosts have different numbers of ranks.
    """
    place = _Place.of(rank, world_size, hosts)
    steps = place.gather(pieces, first=0)
    return place.program("hierarchical_all_gather", steps, pieces, lookahead=max(1, len(steps)))


@lru_cache(maxsize=4096)
def hierarchical_all_reduce(rank: int, world_size: int, pieces: int = 1, *, hosts: Hosts) -> ChunkProgram:
    """The reduce-scatter, then the all-gather. Raises PlanError if hosts have different numbers of ranks."""
    place = _Place.of(rank, world_size, hosts)
    scatter = place.scatter(pieces)
    steps = scatter + place.gather(pieces, first=len(scatter))
    return place.program("hierarchical_all_reduce", steps, pieces)


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a rank: its host, and its index there."""

    hosts: Hosts
    host: int
    local: int

    @classmethod
    def of(cls, rank: int, world_size: int, hosts: Hosts) -> _Place:
        check_alike(hosts)
        assert hosts.world_size == world_size
        host = hosts.number_of(rank)
        return cls(hosts, host, hosts.ranks[host].index(rank))

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.hosts.ranks)

    @property
    def workers(self) -> int:
        """The number of ranks per host."""
        return len(self.hosts.ranks[0])

    def rank(self, host: int, local: int) -> int:
        return self.hosts.ranks[host % self.count][local % self.workers]

    def chunk(self, host: int, local: int) -> int:
        return owned_chunk(self.rank(host, local), self.count * self.workers)

    @property
    def rotation(self) -> int:
        """The number of ranks after which programs repeat (``ChunkProgram.rotation``)."""
        if not self.hosts.in_rank_order:
            return 0
        return 1 if self.count == 1 else self.workers

    def program(
        self, name: str, steps: tuple[Step, ...], pieces: int, lookahead: int | None = None
    ) -> ChunkProgram:
        world_size = self.count * self.workers
        return ChunkProgram(
            name,
            self.rank(self.host, self.local),
            world_size,
            world_size,
            steps,
            pieces,
            LOOKAHEAD_ROUNDS * pieces if lookahead is None else lookahead,
            rotation=self.rotation,
        )

    def scatter(self, pieces: int) -> tuple[Step, ...]:
        """Rounds of the host's ring that pass on one chunk per host, in the order of crossing; then rounds across."""
        steps: list[Step] = []
        for t in range(self.workers - 1):
            for turn in range(self.count):
                owner = self.host - 1 - turn
                for piece in range(pieces):
                    after = ((t - 1) * self.count + turn) * pieces + piece if t else -1
                    sent, received = (
                        self.chunk(owner, self.local - 1 - t),
                        self.chunk(owner, self.local - 2 - t),
                    )
                    steps.append(self._within(sent, received, pieces, piece, after, reduce=True))
        within = len(steps)
        for t in range(self.count - 1):
            for piece in range(pieces):
                after = within + (t - 1) * pieces + piece
                if t == 0:  # what the last round within the host delivered first
                    after = within - self.count * pieces + piece if within else -1
                sent, received = (
                    self.chunk(self.host - 1 - t, self.local),
                    self.chunk(self.host - 2 - t, self.local),
                )
                steps.append(self._across(sent, received, pieces, piece, after, reduce=True))
        return tuple(steps)

    def gather(self, pieces: int, first: int) -> tuple[Step, ...]:
        """Rounds across hosts, then rounds of the host's ring that pass on what these delivered, own chunk first.

        The own chunk is completed by the last ``pieces`` of ``first`` earlier steps, piece by piece.
        """
        steps: list[Step] = []
        for t in range(self.count - 1):
            for piece in range(pieces):
                after = max(-1, first + (t - 1) * pieces + piece)
                sent, received = (
                    self.chunk(self.host - t, self.local),
                    self.chunk(self.host - 1 - t, self.local),
                )
                steps.append(self._across(sent, received, pieces, piece, after, reduce=False))
        across = len(steps)
        for t in range(self.workers - 1):
            for turn in range(self.count):
                owner = self.host - turn
                for piece in range(pieces):
                    after = first + (turn - 1) * pieces + piece  # the round across that delivered it
                    if t:
                        after = first + across + ((t - 1) * self.count + turn) * pieces + piece
                    after = max(-1, after, steps[-1].send_after if steps else -1)
                    sent, received = self.chunk(owner, self.local - t), self.chunk(owner, self.local - 1 - t)
                    steps.append(self._within(sent, received, pieces, piece, after, reduce=False))
        return tuple(steps)

    def _within(self, sent: int, received: int, pieces: int, piece: int, after: int, *, reduce: bool) -> Step:
        right, left = self.rank(self.host, self.local + 1), self.rank(self.host, self.local - 1)
        return Step(sent * pieces + piece, right, received * pieces + piece, left, reduce, after)

    def _across(self, sent: int, received: int, pieces: int, piece: int, after: int, *, reduce: bool) -> Step:
        right, left = self.rank(self.host + 1, self.local), self.rank(self.host - 1, self.local)
        return Step(sent * pieces + piece, right, received * pieces + piece, left, reduce, after)
