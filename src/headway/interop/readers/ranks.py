"""Who is who among imported recordings: ranks, worlds, and whether they are of one job."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from headway.errors import TraceError
from headway.interop.readers.foreign import ForeignRank
from headway.trace.events import Events, Kind, texts
from headway.trace.format import MAX_WORLD_SIZE

SAME_OPERATIONS = 0.5  # of the names in the smaller part: a job repeats itself
APART_NS = 60_000_000_000  # recordings of one job whose wall clocks are further apart do not belong together
_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:global[_-]?)?(?:rank|worker|server|trainer|replica|process|task)[_\-.=]*(\d{1,7})(?!\d)"
    r"|^(\d{1,6})(?=[_\-.])",
    re.IGNORECASE,
)


@dataclass
class Job:
    """The recordings of one job by rank. ``notes`` say what was assumed or left out."""

    workers: dict[int, ForeignRank] = field(default_factory=dict)
    servers: dict[int, ForeignRank] = field(default_factory=dict)
    world_size: int = 1
    notes: list[str] = field(default_factory=list)


def settle(found: Sequence[ForeignRank], *, lenient: bool = False) -> Job:
    """Tell the recordings' ranks.

    Raises TraceError where two recordings claim one rank or belong to different jobs; leniently, the larger recording
    and the larger job are kept.
    """
    job = Job()
    kept = _one_job(list(found), job, lenient)
    for role, ranks in (("worker", job.workers), ("server", job.servers)):
        own = [one for one in kept if one.role == role]
        for rank, claims in sorted(_claims(own, job, role).items()):
            ranks[rank] = claims[0] if len(claims) == 1 else _joined(rank, claims, job, lenient)
    if not job.workers:
        raise TraceError(
            "no worker's recording was found",
            got=f"{len(kept)} recordings of servers",
            expected="at least one worker",
        )
    stated = max(map(_world_size, job.workers.values()))
    job.world_size = max(stated, max(job.workers) + 1)
    if job.world_size > MAX_WORLD_SIZE:
        raise TraceError(
            "a rank is out of range", got=job.world_size - 1, expected=f"less than {MAX_WORLD_SIZE}"
        )
    name_groups_by_members(job.workers)
    return job


def name_groups_by_members(workers: Mapping[int, ForeignRank]) -> None:
    """Give each process group one name on all of its ranks, and no two groups the same, in place.

    A group is its members. Some releases call several groups alike, and others give one group another name on each
    rank. Several groups of the same members are told apart by their order.
    """
    names: dict[tuple[int, ...], list[str]] = {}
    renamed: dict[int, dict[str, tuple[tuple[int, ...], int]]] = {}
    for rank, one in sorted(workers.items()):
        counted: Counter[tuple[int, ...]] = Counter()
        for name, members in one.groups.items():
            place = counted[members]
            counted[members] += 1
            own = names.setdefault(members, [])
            if place == len(own):
                own.append(name)
            renamed.setdefault(rank, {})[name] = members, place
    users = Counter(name for own in names.values() for name in set(own))
    final: dict[tuple[tuple[int, ...], int], str] = {}
    taken: set[str] = set()
    for members, own in names.items():
        for place, name in enumerate(own):
            told = name if users[name] == 1 and own.count(name) == 1 else f"{name} ({_in_words(members)})"
            while told in taken:
                told += "'"
            taken.add(told)
            final[members, place] = told
    for rank, one in workers.items():
        of_name = {name: final[group] for name, group in renamed.get(rank, {}).items()}
        if any(name != told for name, told in of_name.items()):
            one.events = replace(
                one.events, group=texts([of_name.get(name, name) for name in one.events.group.tolist()])
            )
        one.groups = {told: one.groups[name] for name, told in of_name.items()}


def _in_words(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:4]))
    return f"ranks {shown}" + (f" and {len(members) - 4} more" if len(members) > 4 else "")


def rank_in_name(name: str) -> int | None:
    """The rank that a file's name, or else that of its folder, tells of; None where neither does."""
    for part in reversed(PurePath(name.replace(":", "/")).parts[-2:]):
        found = list(_RANK_IN_NAME.finditer(part))
        stated = [match for match in found if match[1]]
        if found:
            match = (stated or found)[-1]
            return int(match[1] or match[2])
    return None


def _one_job(found: list[ForeignRank], job: Job, lenient: bool) -> list[ForeignRank]:
    """What belongs to one job: of one framework and world, recorded at one time."""
    jobs: dict[tuple[str, int], list[ForeignRank]] = defaultdict(list)
    stated = {one.framework: _world_size(one) for one in found if _world_size(one)}
    for one in found:  # who does not state how many they were may be of any job
        jobs[one.framework, _world_size(one) or stated.get(one.framework, 0)].append(one)
    groups = [group for key in jobs for group in _at_one_time(jobs[key])]
    workers = [group for group in groups if any(one.role == "worker" for one in group)]
    if len(workers) <= 1:
        return found
    largest = max(workers, key=lambda group: (len(group), sum(len(one.events) for one in group)))
    words = "; ".join(_words(group) for group in workers[:4])
    if not lenient:
        raise TraceError(
            "recordings of several jobs are mixed",
            got=words,
            expected="recordings of one job",
            fix="Import each job's files separately, or pass --lenient to keep the largest job.",
        )
    job.notes.append(
        f"Recordings of several jobs were mixed ({words}); those of {_words(largest)} were kept."
    )
    return largest


def _world_size(one: ForeignRank) -> int:
    """How many workers its job has; 0 where it does not say. Groups tell it as well."""
    members = [rank + 1 for ranks in one.groups.values() for rank in ranks]
    return one.world_size or max(members, default=0) if one.role == "worker" else 0


def _words(group: list[ForeignRank]) -> str:
    first = group[0]
    return f"{len(group)} of {first.framework} on {first.world_size or 'unknown'} ranks ({PurePath(first.source).name})"


def _at_one_time(group: list[ForeignRank]) -> list[list[ForeignRank]]:
    """Split where nothing was recorded for longer than clocks differ by; what has no wall clock comes first."""
    timed = sorted(
        (one for one in group if one.absolute and len(one.events)), key=lambda one: one.events.start_ns[0]
    )
    rest = [one for one in group if not (one.absolute and len(one.events))]
    groups: list[list[ForeignRank]] = [rest] if rest else []
    reach_ns = None
    for one in timed:
        start_ns, end_ns = int(one.events.start_ns[0]), int(one.events.end_ns.max())
        if reach_ns is None or start_ns > reach_ns + APART_NS:
            groups = groups or [[]]
            if reach_ns is not None:
                groups.append([])
        groups[-1].append(one)
        reach_ns = max(end_ns, reach_ns or end_ns)
    return groups


def _claims(own: list[ForeignRank], job: Job, role: str) -> dict[int, list[ForeignRank]]:
    """Who claims each rank: by what the recording says, else by its name, else in the order of names."""
    claims: dict[int, list[ForeignRank]] = defaultdict(list)
    named = {id(one): rank_in_name(one.source) for one in own if one.rank is None}
    shared = Counter(one.source for one in own)
    unnamed = []
    for one in own:
        name_says = named.get(id(one)) if shared[one.source] == 1 else None
        rank = one.rank if one.rank is not None else name_says
        if rank is None or not 0 <= rank < MAX_WORLD_SIZE:
            unnamed.append(one)
        else:
            claims[rank].append(one)
    free = (rank for rank in range(len(claims) + len(unnamed)) if rank not in claims)
    taken = list(zip(free, unnamed, strict=False))
    for rank, one in taken:
        claims[rank].append(one)
    if taken and len(own) > 1:
        job.notes.append(
            f"Neither contents nor names give the rank of {len(taken)} {role}s: they are numbered in order of names."
        )
    return claims


def _joined(rank: int, claims: list[ForeignRank], job: Job, lenient: bool) -> ForeignRank:
    """Recordings of one rank: parts of one recording, one after the other, or a contradiction."""
    ordered = sorted(claims, key=lambda one: int(one.events.start_ns[0]) if len(one.events) else 0)
    if _follow_each_other(ordered):
        first = ordered[0]
        first.events = Events.concatenated([one.events for one in ordered])
        first.dropped_events = sum(one.dropped_events for one in ordered)
        first.notes = list(dict.fromkeys(note for one in ordered for note in one.notes))
        return first
    names = ", ".join(PurePath(claim.source).name for claim in claims[:4])
    if not lenient:
        raise TraceError(
            f"rank {rank} was found {len(claims)} times",
            got=names,
            expected="one recording per rank",
            fix="Remove the others, or pass --lenient to keep the largest.",
        )
    largest = max(claims, key=lambda one: len(one.events))
    job.notes.append(
        f"Rank {rank} was found {len(claims)} times ({names}): {PurePath(largest.source).name} was kept."
    )
    return largest


def _follow_each_other(ordered: list[ForeignRank]) -> bool:
    """Whether these are stretches of one recording: one after the other, no step twice, the same operations."""
    seen: set[int] = set()
    names: set[str] = set()
    reach_ns: int | None = None
    for one in ordered:
        if not (one.absolute and len(one.events)) or one.clock != ordered[0].clock:
            return False
        steps = one.events.whole_steps
        own = set(one.events.name[one.events.kind != Kind.STEP].tolist())
        if names and len(names & own) < SAME_OPERATIONS * min(len(names), len(own)):
            return False
        names |= own
        if seen & steps or (reach_ns is not None and int(one.events.start_ns[0]) < reach_ns):
            return False
        seen |= steps
        reach_ns = int(one.events.end_ns.max())
    return True
