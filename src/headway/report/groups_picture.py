"""Draws averaging groups: which ranks average together over time, and how far apart their models are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.diagnosis.averaging import Averaging, Group
from headway.report import words
from headway.units import counted

MAX_RANKS, MAX_BOXES, MAX_POINTS = 32, 1500, 400
MOST_A_RANK = 14  # groups drawn per rank
WIDTH, MARGIN, LANE, GAP, AXIS = 1000.0, 64.0, 20.0, 4.0, 22.0
CHART = 120.0  # height of the chart of distances
TICKS = 6
_DIGIT = 7.5


@dataclass(frozen=True, slots=True)
class Block:
    """A rank's time in a group, in the picture's units: the wait until the group begins, or the group itself."""

    x: float
    y: float
    width: float
    colour: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class GroupsPicture:
    """Lanes of ranks with blocks and time marks, and a line of distances (``points``) with its own marks."""

    title: str
    height: float
    lanes: tuple[tuple[str, float], ...]
    blocks: tuple[Block, ...]
    marks: tuple[tuple[float, str], ...]
    left_out: str
    points: str
    distance_title: str
    distance_marks: tuple[tuple[float, str], ...]
    largest: str

    width: float = WIDTH
    margin: float = MARGIN
    lane: float = LANE
    lane_width: float = WIDTH - MARGIN
    chart: float = CHART


def groups_picture(averaging: Averaging | None) -> GroupsPicture | None:
    """The picture of ``averaging``; None without groups of several ranks."""
    if averaging is None or not averaging.groups:
        return None
    ranks = sorted(averaging.standing_ms)[:MAX_RANKS]
    shown = _shown(averaging.groups, ranks)
    begin_ns = min(min(group.asked_ns.values()) for group in shown)
    end_ns = max(group.ended_ns for group in shown)
    length_ns = max(1, end_ns - begin_ns)
    scale = (WIDTH - MARGIN) / length_ns
    tops = {rank: place * (LANE + GAP) for place, rank in enumerate(ranks)}
    blocks = [block for group in shown for block in _blocks(group, tops, begin_ns, scale)]
    points, distance_marks, largest = _distances(averaging.distances)
    left_out = [
        counted(len(averaging.standing_ms) - len(ranks), "more rank") if len(ranks) < len(averaging.standing_ms) else "",
        counted(len(averaging.groups) - len(shown), "more group") if len(shown) < len(averaging.groups) else "",
    ]  # fmt: skip
    omitted = " and ".join(filter(None, left_out))
    return GroupsPicture(
        title=f"{counted(len(shown), 'group')} of {counted(len(ranks), 'rank')} in "
        f"{words.duration(length_ns / 1e6)}",
        height=len(ranks) * (LANE + GAP) + AXIS,
        lanes=tuple((f"rank {rank}", tops[rank]) for rank in ranks),
        blocks=tuple(blocks[:MAX_BOXES]),
        marks=_marks(length_ns),
        left_out=f"Not drawn: {omitted}." if omitted else "",
        points=points,
        distance_title=f"Distance between the models of a group before averaging, at most {largest}",
        distance_marks=distance_marks,
        largest=largest,
    )


def _shown(groups: Sequence[Group], ranks: Sequence[int]) -> list[Group]:
    """The first groups of the recording, until one of ``ranks`` has more than can be distinguished."""
    counts = dict.fromkeys(ranks, 0)
    shown: list[Group] = []
    for group in groups:
        for rank in group.asked_ns:
            counts[rank] = counts.get(rank, 0) + 1
        if shown and max(counts.values()) > MOST_A_RANK:
            break
        shown.append(group)
    return shown


def _blocks(group: Group, tops: dict[int, float], begin_ns: int, scale: float) -> list[Block]:
    colour = words.GROUP_COLOURS[group.number % len(words.GROUP_COLOURS)]
    members = ", ".join(map(str, group.members[:16])) + (", …" if len(group.members) > 16 else "")
    ended = "" if group.committed else ", which failed"
    length = words.duration((group.ended_ns - group.begun_ns) / 1e6)
    blocks = []
    for rank, asked_ns in group.asked_ns.items():
        if rank not in tops:
            continue
        waited_ns = max(0, group.begun_ns - asked_ns)
        width = (group.ended_ns - group.begun_ns) * scale
        text = str(len(group.members))
        at = MARGIN + (asked_ns - begin_ns) * scale
        if waited_ns:
            title = f"rank {rank} waits for group {group.number}: {words.duration(waited_ns / 1e6)}"
            colour_of_wait = words.PASS_COLOURS[words.WAITING]
            blocks.append(Block(at, tops[rank], waited_ns * scale, colour_of_wait, "", title))
        blocks.append(
            Block(
                at + waited_ns * scale, tops[rank], max(width, 1.0), colour,
                text if width > _DIGIT * len(text) + 2 else "",
                f"group {group.number} of ranks {members}{ended}: {length}",
            )
        )  # fmt: skip
    return blocks


def _distances(
    distances: Sequence[tuple[int, float]],
) -> tuple[str, tuple[tuple[float, str], ...], str]:
    """The distances as a polyline, the marks of its time axis, and the largest distance as text."""
    if not distances:
        return "", (), "0"
    every = -(-len(distances) // MAX_POINTS)
    kept = [
        max(distances[at : at + every], key=lambda pair: pair[1]) for at in range(0, len(distances), every)
    ]
    begin_ns, end_ns = kept[0][0], kept[-1][0]
    length_ns = max(1, end_ns - begin_ns)
    top = max(value for _, value in kept) or 1.0
    scale = (WIDTH - MARGIN) / length_ns
    points = " ".join(
        f"{MARGIN + (time_ns - begin_ns) * scale:.1f},{CHART - value / top * (CHART - 8):.1f}"
        for time_ns, value in kept
    )
    return points, _marks(length_ns), f"{top:.2g} of their norm"


def _marks(length_ns: int) -> tuple[tuple[float, str], ...]:
    return tuple(
        (MARGIN + (WIDTH - MARGIN) * part / TICKS, words.duration(length_ns * part / TICKS / 1e6))
        for part in range(TICKS + 1)
    )
