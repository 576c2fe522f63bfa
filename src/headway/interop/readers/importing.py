"""Importing: other tools' documents become a trace like a recorded one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from headway import files
from headway.clocks import aligned, fit_clocks, meetings_of
from headway.errors import TraceError, one_line
from headway.interop.readers import execution_trace, flight_recorder
from headway.interop.readers.document import Found, Sources, head_of
from headway.interop.readers.foreign import Companion, ForeignRank
from headway.interop.readers.formats import GROUP, Reader, readers, recognised, why_not_recognised
from headway.interop.readers.numbering import number_collectives
from headway.interop.readers.ranks import Job, settle
from headway.interop.readers.reading import read_all
from headway.model import ModelSpec
from headway.plugins import why_unusable
from headway.trace.folder import write_trace
from headway.trace.format import ClockFit, Manifest, RankInfo

AUTO = "auto"


@dataclass(frozen=True)
class Imported:
    """What an import made: its manifest, and what was read for it."""

    manifest: Manifest
    formats: dict[str, int]  # documents read, a format each
    left_out: tuple[str, ...]  # documents of no known format


def import_trace(
    source: Path,
    out: Path,
    *,
    format_name: str = AUTO,
    lenient: bool = False,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Imported:
    """Read what ``source`` (a file, a folder, an archive) holds of a job and write it to ``out``, a folder, as a trace.

    ``format_name`` is AUTO or the name of one of ``readers``. ``lenient`` keeps what can be kept of damaged input; the
    trace's notes say what was dropped. ``workers`` processes read at a time; more than one needs a main module that
    can be imported (as ``multiprocessing`` does). Raises TraceError where nothing can be imported, input is damaged,
    or ``out`` exists.
    """
    files.check_absent(out, TraceError)
    with Sources(source, lenient=lenient) as sources:
        documents, left_out = sort_out(sources.find(), format_name, sources.left_out if lenient else None)
        read = read_all(documents, lenient=lenient, workers=workers, progress=progress)
        notes = [*sources.left_out, *read.refused]
    if not read.ranks:
        raise _nothing_timed(read.companions, read.refused)
    notes += _unused(read.companions, read.ranks)
    job = settle(read.ranks, lenient=lenient)
    notes += number_collectives({rank: one.events for rank, one in sorted(job.workers.items())})
    clocks, clock_notes = _align(job)
    manifest = _manifest(job, clocks, [*notes, *clock_notes])
    with files.folder_written_whole(out, TraceError) as folder:
        write_trace(
            folder,
            manifest,
            ModelSpec(parameters=()),
            {rank: one.events for rank, one in job.workers.items()},
            {rank: one.events for rank, one in job.servers.items()},
        )
    return Imported(manifest, dict(Counter(chosen.name for _, chosen in documents)), tuple(left_out))


def sort_out(
    found: Sequence[Found], format_name: str, unreadable: list[str] | None = None
) -> tuple[list[tuple[Found, Reader]], list[str]]:
    """What reads each document; and the names of documents that nothing reads.

    What cannot be read is said in ``unreadable``. Raises TraceError where there is no such list, or no document.
    """
    if format_name != AUTO:
        if format_name not in readers():
            if why_not := why_unusable(GROUP, format_name):
                raise TraceError(why_not)
            raise TraceError("no such format", got=format_name, expected=", ".join([AUTO, *readers()]))
        return [(file, readers()[format_name]) for file in found], []
    readable: list[tuple[Found, Reader]] = []
    left_out = []
    why_not = ""
    for file in found:
        try:
            head = head_of(file)
        except TraceError as failure:
            if unreadable is None:
                raise
            unreadable.append(f"Left out: {failure}")
            continue
        reader = recognised(file.name, head)
        if reader is None:
            left_out.append(file.name)
            why_not = why_not or why_not_recognised(file.name, head)
        else:
            readable.append((file, reader))
    if not readable and why_not:
        raise TraceError(why_not)
    if not readable:
        raise TraceError(
            "no file of a known format",
            got=f"{len(found)} file{'s' if len(found) > 1 else ''}, such as {found[0].name}",
            expected=", ".join(reader.title for reader in readers().values()),
            fix="If it is one of these, name it with --format.",
        )
    return _once(readable), left_out


def _once(readable: list[tuple[Found, Reader]]) -> list[tuple[Found, Reader]]:
    """Without documents beside which the same recording lies in a fuller format."""
    formats = {(str(PurePath(file.name).parent), reader.name) for file, reader in readable}
    return [
        (file, reader)
        for file, reader in readable
        if not any((str(PurePath(file.name).parent), fuller) in formats for fuller in reader.yields_to)
    ]


def _nothing_timed(companions: Sequence[Companion], refused: Sequence[str]) -> TraceError:
    if not companions:
        return TraceError("no file could be read", got=refused[0] if refused else "nothing")
    lacks = execution_trace.LACKS if companions[0].kind == "execution_trace" else flight_recorder.LACKS
    return TraceError(f"nothing here has times. {lacks}", got=companions[0].source)


def _unused(companions: Sequence[Companion], ranks: Sequence[ForeignRank]) -> list[str]:
    """What to say of documents that tell of communication, but of no rank whose times are here."""
    timed = {one.rank for one in ranks}
    return [
        f"{one.source} was not used: "
        + (
            "it does not say which rank it is of; put that into its name, as in rank3.json."
            if one.rank is None
            else f"it is of rank {one.rank}, of which nothing here has times."
        )
        for one in companions
        if one.rank not in timed
    ]


def _align(job: Job) -> tuple[dict[str, dict[int, ClockFit]], list[str]]:
    """Bring everybody's events onto the first worker's clock."""
    clock_of = {rank: _clock(one, f"rank {rank}") for rank, one in sorted(job.workers.items())}
    names = list(dict.fromkeys(clock_of.values()))
    fits = {names[0]: ClockFit()}
    notes = []
    if len(names) > 1:
        on_devices = frozenset(rank for rank, one in job.workers.items() if one.on_device)
        meetings = meetings_of({rank: one.events for rank, one in job.workers.items()}, clock_of, on_devices)
        fits = fit_clocks(meetings, names)
        notes.append(f"{len(names)} clocks were aligned by what ranks did together.")
    for rank, one in job.workers.items():
        one.events = aligned(one.events, fits[clock_of[rank]])
    server_fits = {}
    for server, one in job.servers.items():
        server_fits[server] = fits.get(_clock(one, ""), ClockFit())
        one.events = aligned(one.events, server_fits[server])
    return {"worker": {rank: fits[clock] for rank, clock in clock_of.items()}, "server": server_fits}, notes


def _clock(one: ForeignRank, otherwise: str) -> str:
    """The name of the clock that timed a recording: wall clocks belong to hosts."""
    return one.clock or (f"host {one.host}" if one.host and one.absolute else otherwise)


def _manifest(job: Job, clocks: Mapping[str, Mapping[int, ClockFit]], notes: Sequence[str]) -> Manifest:
    steps = set.intersection(*(one.events.whole_steps for one in job.workers.values()))
    if not steps:
        raise TraceError(
            "the ranks share no step",
            got={rank: sorted(one.events.whole_steps)[:4] for rank, one in list(job.workers.items())[:4]},
            expected="at least one step that all of them recorded",
            fix="Import ranks that were recorded over the same steps.",
        )
    missing = job.world_size - len(job.workers)
    return Manifest(
        framework=next(iter(job.workers.values())).framework,
        world_size=job.world_size,
        steps=tuple(sorted(steps)),
        ranks=tuple(
            _info(rank, one, job, clocks["worker"][rank]) for rank, one in sorted(job.workers.items())
        ),
        servers=tuple(
            _info(rank, one, job, clocks["server"][rank]) for rank, one in sorted(job.servers.items())
        ),
        groups={name: members for one in job.workers.values() for name, members in one.groups.items()},
        notes=tuple(
            dict.fromkeys(
                one_line(note, limit=1000)
                for note in [
                    *([f"{missing} of {job.world_size} ranks are not in this trace."] if missing else []),
                    *job.notes,
                    *notes,
                    *_said_by_ranks(job),
                ]
            )
        ),
    )


def _said_by_ranks(job: Job) -> list[str]:
    """What readers said, once, with the ranks of which it was said where it is not of all."""
    said: dict[str, list[str]] = {}
    for role, ranks in (("rank", job.workers), ("server", job.servers)):
        for rank, one in sorted(ranks.items()):
            for note in one.notes:
                said.setdefault(note, []).append(f"{role} {rank}")
    everybody = len(job.workers) + len(job.servers)
    return [
        note if len(of) == everybody else f"{', '.join(of[:4])}{' and more' if len(of) > 4 else ''}: {note}"
        for note, of in said.items()
    ]


def _info(rank: int, one: ForeignRank, job: Job, clock: ClockFit) -> RankInfo:
    return RankInfo(
        rank=rank,
        host=one_line(one.host) or f"{one.role}{rank}",
        world_size=job.world_size,
        backend=one_line(one.backend),
        version=one_line(one.version),
        source=one.source,
        clock=clock,
        device=one_line(one.device)[:200],
        dropped_events=one.dropped_events,
    )
