"""Group schedules: which ranks average their models with each other in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from headway.units import counted

Group = tuple[int, ...]


@dataclass(frozen=True)
class GroupSchedule:
    """Round ``i`` of training averages within each group of ``rounds[i % len(rounds)]``; other ranks continue alone.

    Raises ValueError for ranks outside ``world_size``, in two groups of a round, or alone in a group.
    """

    world_size: int
    rounds: tuple[tuple[Group, ...], ...]

    def __post_init__(self) -> None:
        if not self.rounds:
            raise ValueError("a schedule has at least one round")
        for number, groups in enumerate(self.rounds):
            members = [rank for group in groups for rank in group]
            if len(set(members)) < len(members):
                raise ValueError(f"a rank is in two groups of round {number}")
            if any(not 0 <= rank < self.world_size for rank in members):
                raise ValueError(f"round {number} has a rank that is not below {self.world_size}")
            if any(len(group) < 2 or list(group) != sorted(group) for group in groups):
                raise ValueError(f"a group of round {number} has one rank, or ranks out of order")

    @property
    def parts(self) -> str:
        """The parts of training, in words."""
        return f"groups that repeat after {counted(len(self.rounds), 'round')}"

    @property
    def collectives(self) -> int:
        """The number of groups in one repetition."""
        return sum(map(len, self.rounds))

    def group_of(self, rank: int, round_: int) -> Group:
        """The group of ``rank`` in a round of training, itself included; () if it averages with nobody."""
        return next((group for group in self.rounds[round_ % len(self.rounds)] if rank in group), ())


@dataclass(frozen=True)
class CoordinatedGroups:
    """Groups that a generator forms during training as ranks arrive.

    ``generator`` and ``options`` belong to ``coordination.generators``; ``staleness`` is the number of iterations that a
    rank computes while its last group averages.
    """

    world_size: int
    generator: str
    options: tuple[tuple[str, int | float | str], ...] = ()
    staleness: int = 0
    seed: int = 0

    @property
    def parts(self) -> str:
        """What it cuts training into, in words."""
        return f"groups of ranks as they come ({self.generator})"

    @property
    def collectives(self) -> int:
        """1: the number of groups per iteration is not known in advance."""
        return 1


def hosts_in_turn(hosts: Sequence[Sequence[int]], group_size: int) -> GroupSchedule:
    """A schedule without a coordinator for equally fast ranks: alternates averaging within hosts and across hosts.

    ``hosts`` lists the ranks of each host; up to ``group_size`` hosts average together. In every second round each host
    averages as a whole. In the others, one rank of each host averages with those of other hosts and the rest among
    themselves, so that a host's link carries one model per round; groups of hosts change until all hosts have met,
    directly or indirectly. The idea is that of Prague's static schedule (Luo et al., ASPLOS 2020); the rounds are our
    own. Ranks mix within two repetitions. With one rank per host there are no rounds within hosts. Raises ValueError for
    fewer than two ranks, a rank on two hosts, or groups of fewer than two.
    """
    if group_size < 2 or sum(map(len, hosts)) < 2:
        raise ValueError("a group has two ranks")
    hosts = [sorted(ranks) for ranks in hosts if ranks]
    world_size = 1 + max(rank for ranks in hosts for rank in ranks)
    within = tuple(tuple(ranks) for ranks in hosts if len(ranks) > 1)
    rounds = []
    meetings = _meetings(range(len(hosts)), group_size)
    for turn, groups in enumerate(meetings or [()]):
        if within:
            rounds.append(within)
        heads = [ranks[turn % len(ranks)] for ranks in hosts]
        across = [tuple(sorted(heads[host] for host in group)) for group in groups]
        rest = [tuple(rank for rank in ranks if rank != heads[host]) for host, ranks in enumerate(hosts)]
        if across:
            rounds.append(tuple(sorted(across + [ranks for ranks in rest if len(ranks) > 1])))
    return GroupSchedule(world_size, tuple(rounds))


def _meetings(hosts: Sequence[int], most: int) -> list[tuple[Group, ...]]:
    """Rounds of groups of at most ``most`` hosts, after which nearly all hosts have reached each other.

    Blocks of hosts meet among themselves, then the first hosts of all blocks, then the second ones, and so on. If blocks
    differ in size, the last hosts of larger blocks reach the smaller ones only in the next repetition.
    """
    if len(hosts) < 2:
        return []
    if len(hosts) <= most:
        return [(tuple(hosts),)]
    ends = [len(hosts) * number // most for number in range(most + 1)]
    blocks = [hosts[begin:end] for begin, end in pairwise(ends)]
    inside = [_meetings(block, most) for block in blocks]
    rounds = [
        tuple(
            group for block_rounds in inside if number < len(block_rounds) for group in block_rounds[number]
        )
        for number in range(max(map(len, inside)))
    ]
    last = [tuple(host for host in column if host is not None) for column in zip_longest(*blocks)]
    return [*rounds, tuple(group for group in last if len(group) > 1)]
