"""Assigns imported recordings to the ranks of one job."""

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

SAME_OPERATIONS = 0.5  # parts of one recording share at least this share of the smaller part's names
APART_NS = 60_000_000_000  # recordings whose wall clocks are further apart belong to different jobs
_RANK_IN_NAME = re.compile(
    r"(?:^|[^a-z])(?:global[_-]?)?(?:rank|worker|server|trainer|replica|process|task)[_\-.=]*(\d{1,7})(?!\d)"
    r"|^(\d{1,6})(?=[_\-.])",
    re.IGNORECASE,
)


@dataclass
class Job:
    """One job's recordings by rank. ``notes`` say what was assumed or left out."""

    workers: dict[int, ForeignRank] = field(default_factory=dict)
    servers: dict[int, ForeignRank] = field(default_factory=dict)
    world_size: int = 1
    notes: list[str] = field(default_factory=list)


def settle(recordings: Sequence[ForeignRank], *, lenient: bool = False) -> Job:
    """Assign each recording its rank.

    Raises TraceError if two recordings claim the same rank or belong to different jobs; ``lenient`` keeps the larger
    recording and the larger job.
    """
    job = Job()
    kept = _one_job(list(recordings), job, lenient)
    for role, ranks in (("worker", job.workers), ("server", job.servers)):
        of_role = [recording for recording in kept if recording.role == role]
        for rank, claims in sorted(_claims(of_role, job, role).items()):
            ranks[rank] = claims[0] if len(claims) == 1 else _joined(rank, claims, job, lenient)
    if not job.workers:
        raise TraceError(
            "no recording of a worker",
            got=f"{len(kept)} recordings of servers",
            expected="at least one worker",
        )
    stated = max(map(_world_size, job.workers.values()))
    job.world_size = max(stated, max(job.workers) + 1)
    if job.world_size > MAX_WORLD_SIZE:
        raise TraceError("rank out of range", got=job.world_size - 1, expected=f"less than {MAX_WORLD_SIZE}")
    name_groups_by_members(job.workers)
    return job


def name_groups_by_members(workers: Mapping[int, ForeignRank]) -> None:
    """Give each process group one name across its ranks, and every group a different one, in place.

    A group is identified by its members: some releases reuse a name for several groups, others name a group
    differently on each rank. Groups with the same members are told apart by their order.
    """
    names: dict[tuple[int, ...], list[str]] = {}
    renamed: dict[int, dict[str, tuple[tuple[int, ...], int]]] = {}
    for rank, recording in sorted(workers.items()):
        counted: Counter[tuple[int, ...]] = Counter()
        for name, members in recording.groups.items():
            place = counted[members]
            counted[members] += 1
            group_names = names.setdefault(members, [])
            if place == len(group_names):
                group_names.append(name)
            renamed.setdefault(rank, {})[name] = members, place
    users = Counter(name for group_names in names.values() for name in set(group_names))
    final: dict[tuple[tuple[int, ...], int], str] = {}
    taken: set[str] = set()
    for members, group_names in names.items():
        for place, name in enumerate(group_names):
            unique = (
                name
                if users[name] == 1 and group_names.count(name) == 1
                else f"{name} ({_in_words(members)})"
            )
            while unique in taken:
                unique += "'"
            taken.add(unique)
            final[members, place] = unique
    for rank, recording in workers.items():
        of_name = {name: final[group] for name, group in renamed.get(rank, {}).items()}
        if any(name != unique for name, unique in of_name.items()):
            recording.events = replace(
                recording.events,
                group=texts([of_name.get(name, name) for name in recording.events.group.tolist()]),
            )
        recording.groups = {unique: recording.groups[name] for name, unique in of_name.items()}


def _in_words(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:4]))
    return f"ranks {shown}" + (f" and {len(members) - 4} more" if len(members) > 4 else "")


def rank_in_name(name: str) -> int | None:
    """The rank in a file's name, or else in its folder's name; None if neither contains one."""
    for part in reversed(PurePath(name.replace(":", "/")).parts[-2:]):
        matches = list(_RANK_IN_NAME.finditer(part))
        stated = [match for match in matches if match[1]]
        if matches:
            match = (stated or matches)[-1]
            return int(match[1] or match[2])
    return None


def _one_job(recordings: list[ForeignRank], job: Job, lenient: bool) -> list[ForeignRank]:
    """The recordings of one job: the same framework, world size and time."""
    jobs: dict[tuple[str, int], list[ForeignRank]] = defaultdict(list)
    stated = {
        recording.framework: _world_size(recording) for recording in recordings if _world_size(recording)
    }
    for recording in recordings:  # a recording without a world size may belong to any job
        jobs[recording.framework, _world_size(recording) or stated.get(recording.framework, 0)].append(
            recording
        )
    groups = [group for key in jobs for group in _at_one_time(jobs[key])]
    workers = [group for group in groups if any(recording.role == "worker" for recording in group)]
    if len(workers) <= 1:
        return recordings
    largest = max(workers, key=lambda group: (len(group), sum(len(recording.events) for recording in group)))
    words = "; ".join(_words(group) for group in workers[:4])
    if not lenient:
        raise TraceError(
            "the files are recordings of several jobs",
            got=words,
            expected="recordings of one job",
            fix="Import each job separately, or pass --lenient to keep the largest.",
        )
    job.notes.append(f"The files were recordings of several jobs ({words}); kept: {_words(largest)}.")
    return largest


def _world_size(recording: ForeignRank) -> int:
    """The job's number of workers, as stated or from its groups; 0 if unknown."""
    members = [rank + 1 for ranks in recording.groups.values() for rank in ranks]
    return recording.world_size or max(members, default=0) if recording.role == "worker" else 0


def _words(group: list[ForeignRank]) -> str:
    first = group[0]
    return f"{len(group)} of {first.framework} on {first.world_size or 'unknown'} ranks ({PurePath(first.source).name})"


def _at_one_time(group: list[ForeignRank]) -> list[list[ForeignRank]]:
    """Split at gaps longer than APART_NS; recordings without a wall clock join the first group."""
    timed = sorted(
        (recording for recording in group if recording.absolute and len(recording.events)),
        key=lambda recording: recording.events.start_ns[0],
    )
    rest = [recording for recording in group if not (recording.absolute and len(recording.events))]
    groups: list[list[ForeignRank]] = [rest] if rest else []
    reach_ns = None
    for recording in timed:
        start_ns, end_ns = int(recording.events.start_ns[0]), int(recording.events.end_ns.max())
        if reach_ns is None or start_ns > reach_ns + APART_NS:
            groups = groups or [[]]
            if reach_ns is not None:
                groups.append([])
        groups[-1].append(recording)
        reach_ns = max(end_ns, reach_ns or end_ns)
    return groups


def _claims(recordings: list[ForeignRank], job: Job, role: str) -> dict[int, list[ForeignRank]]:
    """The recordings by rank: as stated inside, else by file name, else in the order of names."""
    claims: dict[int, list[ForeignRank]] = defaultdict(list)
    named = {
        id(recording): rank_in_name(recording.source) for recording in recordings if recording.rank is None
    }
    shared = Counter(recording.source for recording in recordings)
    unnamed = []
    for recording in recordings:
        name_says = named.get(id(recording)) if shared[recording.source] == 1 else None
        rank = recording.rank if recording.rank is not None else name_says
        if rank is None or not 0 <= rank < MAX_WORLD_SIZE:
            unnamed.append(recording)
        else:
            claims[rank].append(recording)
    free = (rank for rank in range(len(claims) + len(unnamed)) if rank not in claims)
    taken = list(zip(free, unnamed, strict=False))
    for rank, recording in taken:
        claims[rank].append(recording)
    if taken and len(recordings) > 1:
        job.notes.append(
            f"The rank of {len(taken)} {role}s is in neither contents nor names: they are numbered by file name."
        )
    return claims


def _joined(rank: int, claims: list[ForeignRank], job: Job, lenient: bool) -> ForeignRank:
    """Join consecutive parts of one rank's recording. Raises TraceError if they contradict each other."""
    ordered = sorted(claims, key=lambda part: int(part.events.start_ns[0]) if len(part.events) else 0)
    if _follow_each_other(ordered):
        first = ordered[0]
        first.events = Events.concatenated([part.events for part in ordered])
        first.dropped_events = sum(part.dropped_events for part in ordered)
        first.notes = list(dict.fromkeys(note for part in ordered for note in part.notes))
        return first
    names = ", ".join(PurePath(claim.source).name for claim in claims[:4])
    if not lenient:
        raise TraceError(
            f"{len(claims)} recordings claim rank {rank}",
            got=names,
            expected="one recording per rank",
            fix="Remove all but one, or pass --lenient to keep the largest.",
        )
    largest = max(claims, key=lambda part: len(part.events))
    job.notes.append(
        f"{len(claims)} recordings claim rank {rank} ({names}): {PurePath(largest.source).name} was kept."
    )
    return largest


def _follow_each_other(ordered: list[ForeignRank]) -> bool:
    """Whether these are consecutive parts of one recording: no step twice, and the same operations."""
    seen: set[int] = set()
    names: set[str] = set()
    reach_ns: int | None = None
    for part in ordered:
        if not (part.absolute and len(part.events)) or part.clock != ordered[0].clock:
            return False
        steps = part.events.whole_steps
        part_names = set(part.events.name[part.events.kind != Kind.STEP].tolist())
        if names and len(names & part_names) < SAME_OPERATIONS * min(len(names), len(part_names)):
            return False
        names |= part_names
        if seen & steps or (reach_ns is not None and int(part.events.start_ns[0]) < reach_ns):
            return False
        seen |= steps
        reach_ns = int(part.events.end_ns.max())
    return True
