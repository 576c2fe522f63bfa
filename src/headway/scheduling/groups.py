"""Group schedules: which ranks average their models with which others, round after round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Group = tuple[int, ...]


@dataclass(frozen=True)
class GroupSchedule:
    """Round ``i`` of training averages within each of ``rounds[i % len(rounds)]``; ranks in none go on alone.

    Raises ValueError for a rank that is not in ``world_size``, that is in two groups of a round, or alone in one.
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
        """What it cuts training into, in words."""
        return f"groups that repeat after {len(self.rounds)} rounds"

    @property
    def collectives(self) -> int:
        """How many groups average in one repetition."""
        return sum(map(len, self.rounds))

    def group_of(self, rank: int, round_: int) -> Group:
        """The ranks that ``rank`` averages with in that round of training, itself among them; () where it does not."""
        return next((group for group in self.rounds[round_ % len(self.rounds)] if rank in group), ())

    @cached_property
    def rounds_to_mix(self) -> int | None:
        """After how many rounds what any rank learned has reached every other; None where it never does."""
        reached = [{rank} for rank in range(self.world_size)]
        for count in range(self.world_size * len(self.rounds) + 1):
            if all(len(own) == self.world_size for own in reached):
                return count
            for group in self.rounds[count % len(self.rounds)]:
                union = set().union(*(reached[rank] for rank in group))
                for rank in group:
                    reached[rank] = union
        return None


def pairs_in_turn(world_size: int) -> GroupSchedule:
    """Every rank with every other in turn, in as few rounds as there can be (the circle method of tournaments).

    Of an odd number one goes on alone in each round. Raises ValueError for fewer than two ranks.
    """
    if world_size < 2:
        raise ValueError("pairs need two ranks")
    seats = [*range(world_size), *([-1] if world_size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs = ((min(pair), max(pair)) for pair in facing if -1 not in pair)
        rounds.append(tuple(sorted(pairs)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return GroupSchedule(world_size, tuple(rounds))
