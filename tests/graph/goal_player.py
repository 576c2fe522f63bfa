"""Plays GOAL where messages take no time: the longest path, by the rules that simulators of it share."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

LINE = re.compile(
    r"(?P<label>\w+): "
    r"(?:calc (?P<ns>\d+)|(?P<what>send|recv) (?P<size>\d+)b (?:to|from) (?P<peer>\d+) tag (?P<tag>\d+)) cpu \d+"
)
REQUIRES = re.compile(r"(?P<after>\w+) requires (?P<before>\w+)")


@dataclass
class Operation:
    """One line, and when it is done."""

    rank: int
    duration_ns: int = 0
    what: str = "calc"
    match: tuple[int, int, int, int] = (-1, -1, -1, -1)  # sender, receiver, tag, size
    after: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str) -> dict[tuple[int, str], Operation]:
    """Operations by rank and label. Labels have to stand before they are required."""
    found: dict[tuple[int, str], Operation] = {}
    rank = -1
    lines = text.splitlines()
    assert re.fullmatch(r"num_ranks \d+", lines[0])
    for line in lines[1:]:
        if opened := re.fullmatch(r"rank (\d+) {", line):
            rank = int(opened[1])
        elif said := LINE.fullmatch(line):
            one = Operation(rank, int(said["ns"] or 0), said["what"] or "calc")
            if said["what"]:
                ends = (rank, int(said["peer"])) if said["what"] == "send" else (int(said["peer"]), rank)
                one.match = (*ends, int(said["tag"]), int(said["size"]))
            assert (rank, said["label"]) not in found
            found[rank, said["label"]] = one
        elif said := REQUIRES.fullmatch(line):
            assert (rank, said["before"]) in found
            found[rank, said["after"]].after.append((rank, said["before"]))
        else:
            assert line in ("", "}"), line
    return found


def ends_ns(text: str) -> dict[tuple[int, str], int]:
    """When every operation is done."""
    found = parse(text)
    sends = {one.match: label for label, one in found.items() if one.what == "send"}
    assert len(sends) == sum(one.what == "send" for one in found.values())
    before = {label: [*one.after] for label, one in found.items()}
    for label, one in found.items():
        if one.what == "recv":
            before[label].append(sends.pop(one.match))
    assert not sends, "nobody receives it"
    following = defaultdict(list)
    left = {label: len(waits) for label, waits in before.items()}
    for label, waits in before.items():
        for earlier in waits:
            following[earlier].append(label)
    ends: dict[tuple[int, str], int] = {}
    ready = [label for label, count in left.items() if not count]
    while ready:
        now = ready.pop()
        ends[now] = max((ends[earlier] for earlier in before[now]), default=0) + found[now].duration_ns
        for later in following[now]:
            left[later] -= 1
            if not left[later]:
                ready.append(later)
    assert len(ends) == len(found), "it never ends"
    return ends
