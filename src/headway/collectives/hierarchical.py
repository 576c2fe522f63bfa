"""Hierarchical collectives: rings within hosts and rings across them, as chunk programs.

Rank ``l`` of a host is the ``l``-th of its ranks. The reduce-scatter first adds up within each host, in a ring of its
ranks, so that rank ``l`` has its host's sum of the chunks that the ``l``-th ranks of all hosts own; then these add
their sums up in a ring across hosts. The all-gather goes the other way round. A rank sends and receives
``world_size - 1`` chunks each way, as many as in one ring of all ranks, but only ``hosts - 1`` of them cross from
host to host: each host's link carries ``(hosts - 1) / hosts`` of the tensor rather than
``(world_size - 1) / world_size``, in ``hosts - 1`` rounds that follow each other.

All hosts have the same number of ranks. With one host, or one rank a host, what remains is the ring of all ranks.
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
    """The ranks of each host, in order; hosts are in the order of their first ranks."""

    ranks: tuple[Ranks, ...]

    @classmethod
    def of_places(cls, places: Sequence[Hashable]) -> Hosts:
        """Of the host of each rank: equal where ranks share one."""
        found: dict[Hashable, list[int]] = {}
        for rank, place in enumerate(places):
            found.setdefault(place, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> Hosts:
        """Those of a cluster."""
        return cls.of_places(cluster.host_of_rank)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.ranks))

    @property
    def are_alike(self) -> bool:
        """Whether all have the same number of ranks."""
        return len(set(map(len, self.ranks))) == 1

    @property
    def in_rank_order(self) -> bool:
        """Whether the ranks of each host follow each other, and those of the next host follow them."""
        listed = [rank for ranks in self.ranks for rank in ranks]
        return listed == list(range(len(listed)))

    def number_of(self, rank: int) -> int:
        """Which of the hosts ``rank`` is on."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def ranks_of(self, numbers: Sequence[int]) -> Ranks:
        """All ranks of some of the hosts, in order."""
        return tuple(sorted(rank for number in numbers for rank in self.ranks[number]))


def check_alike(hosts: Hosts) -> None:
    """Raise PlanError unless all hosts have the same number of ranks."""
    if not hosts.are_alike:
        raise PlanError(
            "hierarchical collectives need hosts that all have the same number of workers",
            got=f"hosts with {', '.join(map(str, sorted({len(ranks) for ranks in hosts.ranks})))} workers",
            expected="as many on every host",
            fix="Use the ring.",
        )


def differs_from_rings(hosts: Hosts) -> bool:
    """Whether hierarchical collectives can be had on ``hosts``, and are not just the ring of all ranks."""
    return hosts.are_alike and len(hosts.ranks) > 1 and len(hosts.ranks[0]) > 1


@lru_cache(maxsize=4096)
def hierarchical_reduce_scatter(rank: int, world_size: int, pieces: int = 1, *, hosts: Hosts) -> ChunkProgram:
    """Within the host, then across; the own chunk is whole at the end.

    Raises PlanError where hosts have different numbers of ranks.
    """
    place = _Place.of(rank, world_size, hosts)
    return place.program("hierarchical_reduce_scatter", place.scatter(pieces), pieces)


@lru_cache(maxsize=4096)
def hierarchical_all_gather(rank: int, world_size: int, pieces: int = 1, *, hosts: Hosts) -> ChunkProgram:
    """Across hosts, then within them, from the own chunk on. All receives are posted at the beginning.

    Raises PlanError where hosts have different numbers of ranks.
    """
    place = _Place.of(rank, world_size, hosts)
    steps = place.gather(pieces, first=0)
    return place.program("hierarchical_all_gather", steps, pieces, lookahead=max(1, len(steps)))


@lru_cache(maxsize=4096)
def hierarchical_all_reduce(rank: int, world_size: int, pieces: int = 1, *, hosts: Hosts) -> ChunkProgram:
    """The reduce-scatter, then the all-gather. Raises PlanError where hosts have different numbers of ranks."""
    place = _Place.of(rank, world_size, hosts)
    scatter = place.scatter(pieces)
    steps = scatter + place.gather(pieces, first=len(scatter))
    return place.program("hierarchical_all_reduce", steps, pieces)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is: which of the hosts, and which of its ranks."""

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
        """How many hosts there are."""
        return len(self.hosts.ranks)

    @property
    def workers(self) -> int:
        """How many ranks each has."""
        return len(self.hosts.ranks[0])

    def rank(self, host: int, local: int) -> int:
        return self.hosts.ranks[host % self.count][local % self.workers]

    def chunk(self, host: int, local: int) -> int:
        return owned_chunk(self.rank(host, local), self.count * self.workers)

    @property
    def rotation(self) -> int:
        """After how many ranks programs repeat, shifted."""
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
        """Rounds of the host's ring that hand on a chunk of each host's, first what crosses first; then across."""
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
                if t == 0:  # what the last round within brought first
                    after = within - self.count * pieces + piece if within else -1
                sent, received = (
                    self.chunk(self.host - 1 - t, self.local),
                    self.chunk(self.host - 2 - t, self.local),
                )
                steps.append(self._across(sent, received, pieces, piece, after, reduce=True))
        return tuple(steps)

    def gather(self, pieces: int, first: int) -> tuple[Step, ...]:
        """Rounds across hosts, then rounds of the host's ring that hand on what each of them brought, own chunk first.

        The own chunk was whole when the last ``pieces`` of ``first`` earlier steps were done, piece by piece.
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
                    after = first + (turn - 1) * pieces + piece  # the round across that brought it
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
