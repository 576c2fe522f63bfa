"""A schedule of groups for tests, and how fast one mixes what ranks learn."""

from __future__ import annotations

from headway.scheduling.groups import GroupSchedule


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


def rounds_to_mix(schedule: GroupSchedule) -> int | None:
    """After how many rounds what any rank learned has reached every other; None where it never does."""
    reached = [{rank} for rank in range(schedule.world_size)]
    for count in range(schedule.world_size * len(schedule.rounds) + 1):
        if all(len(own) == schedule.world_size for own in reached):
            return count
        for group in schedule.rounds[count % len(schedule.rounds)]:
            union = set().union(*(reached[rank] for rank in group))
            for rank in group:
                reached[rank] = union
    return None
