"""Importing: other tools' documents become a trace like a recorded one."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path, PurePath

from headway import files
from headway.clocks import aligned, fit_clocks, meetings_of
from headway.errors import TraceError, one_line
from headway.interop.readers import execution_trace, flight_recorder
from headway.interop.readers.document import Found, Sources, head_of, on_disk, read_document
from headway.interop.readers.foreign import Companion, ForeignRank, Reading
from headway.interop.readers.formats import GROUP, Reader, readers, recognised, why_not_recognised
from headway.interop.readers.numbering import number_collectives
from headway.interop.readers.ranks import Job, settle
from headway.model import ModelSpec
from headway.plugins import PluginFaultError, is_own, why_unusable
from headway.trace.folder import write_trace
from headway.trace.format import ClockFit, Manifest, RankInfo

COMPANIONS = ("flight-recorder", "execution-trace")  # formats that only add to what another one says
WORTH_BYTES = 128 * 2**20  # of unpacked documents: starting processes for less takes longer than reading
USUAL_RATIO = 13  # of what a packed document unpacks to
MOST_WORKERS = 8
SAFE_PATH = "PYTHONSAFEPATH"  # Python's own, which is what its option -P is
AHEAD = 2  # documents that each process has before it

Documents = Sequence[tuple[Found, Reader]]
Waiting = Future[Reading | TraceError]


@dataclass
class Read:
    """What all documents held. ``refused`` says why some were left out, leniently."""

    ranks: list[ForeignRank] = field(default_factory=list)
    companions: list[Companion] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def read_all(
    documents: Documents, *, lenient: bool, workers: int, progress: Callable[[int, int], None]
) -> Read:
    """Read ``documents``, up to ``workers`` of them at a time, where that is worth it each in a process of its own.

    Raises TraceError for the first that cannot be read, unless ``lenient`` and there are others.
    """
    done = Read()
    first = [(found, chosen) for found, chosen in documents if chosen.name in COMPANIONS]
    others = [(found, chosen) for found, chosen in documents if chosen.name not in COMPANIONS]
    tolerant = lenient and len(documents) > 1
    count = 0
    for outcome in _outcomes(first, [], lenient, 1):
        _take(done, outcome, tolerant)
        progress(count := count + 1, len(documents))
    for outcome in _outcomes(others, done.companions, lenient, workers):
        _take(done, outcome, tolerant)
        progress(count := count + 1, len(documents))
    return done


def _take(done: Read, outcome: Reading | TraceError, tolerant: bool) -> None:
    if isinstance(outcome, TraceError):
        if not tolerant:
            raise outcome
        done.refused.append(f"Left out: {outcome}")
        return
    done.ranks += outcome.ranks
    done.companions += outcome.companions


def _outcomes(
    documents: Documents, companions: Sequence[Companion], lenient: bool, workers: int
) -> Iterator[Reading | TraceError]:
    """What came of each document, in their order."""
    on_disk_all = all(found.path is not None for found, _ in documents)
    much = sum(_unpacked_bytes(found) for found, _ in documents) >= WORTH_BYTES
    if min(workers, len(documents)) < 2 or not on_disk_all or not much:
        for found, chosen in documents:
            yield _outcome(found, chosen, companions, lenient)
        return
    yield from _side_by_side(documents, companions, lenient, min(workers, len(documents), MOST_WORKERS))


def _side_by_side(
    documents: Documents, companions: Sequence[Companion], lenient: bool, workers: int
) -> Iterator[Reading | TraceError]:
    """This process takes documents from the beginning and ``workers - 1`` others from the end, until they meet."""
    left, handed_out = deque(documents), deque[tuple[Found, Waiting]]()
    at_work: list[Waiting] = []
    ahead = AHEAD * (workers - 1)
    # Not forked: this process may have threads, which a fork would leave behind with their locks held.
    with _safe_path():
        opened = ProcessPoolExecutor(workers - 1, mp_context=get_context("spawn"))
    with opened as pool:
        try:
            while left:
                at_work = [one for one in at_work if not one.done()]
                # Nothing is handed out to be taken back: a pool that breaks while one of its futures is cancelled
                # never answers (Python 3.11).
                while left and len(at_work) < ahead:
                    found, chosen = left.pop()
                    try:
                        with _safe_path():
                            waiting = pool.submit(
                                _read_apart, found.path, chosen.name, tuple(companions), lenient
                            )
                    except BrokenProcessPool:
                        left.append((found, chosen))
                        ahead = 0
                        break
                    at_work.append(waiting)
                    handed_out.appendleft((found, waiting))
                if left:
                    yield _outcome(*left.popleft(), companions, lenient)
            for found, waiting in handed_out:
                yield _result(found, waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Processes of multiprocessing that are started in it import nothing from the current folder as they start."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _result(found: Found, waiting: Waiting) -> Reading | TraceError:
    try:
        return waiting.result()
    except (BrokenProcessPool, OSError):  # killed for want of memory, or the file is gone
        return TraceError(
            f"{found.name} could not be read", got="its reader process died", fix="Import it on its own."
        )


def _unpacked_bytes(found: Found) -> int:
    return found.size_bytes * (USUAL_RATIO if found.name.endswith(".gz") else 1)


def _outcome(
    found: Found, reader: Reader, companions: Sequence[Companion], lenient: bool
) -> Reading | TraceError:
    try:
        reading: object = reader.read(read_document(found, lenient=lenient), companions)
    except TraceError as failure:
        return failure
    except MemoryError:
        return TraceError(f"{found.name} does not fit into memory", got=f"{found.size_bytes} bytes")
    except Exception as error:
        if is_own(reader):
            raise
        return _fault(found, reader, f"it raised {type(error).__name__}: {error}")
    return reading if isinstance(reading, Reading) else _fault(found, reader, "it returned no Reading")


def _fault(found: Found, reader: Reader, reason: str) -> TraceError:
    """What is wrong with a reader of another package, as text, which goes from one process to another."""
    fault = PluginFaultError("reader", reader, one_line(reason))
    return TraceError(f"{found.name} could not be read: {fault}")


def _read_apart(
    path: Path | None, format_name: str, companions: Sequence[Companion], lenient: bool
) -> Reading | TraceError:
    """Read one document in a process of its own."""
    assert path is not None
    return _outcome(on_disk(path), readers()[format_name], companions, lenient)


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
            {rank: worker.events for rank, worker in job.workers.items()},
            {rank: server.events for rank, server in job.servers.items()},
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
    return TraceError(f"no file contains times. {lacks}", got=companions[0].source)


def _unused(companions: Sequence[Companion], ranks: Sequence[ForeignRank]) -> list[str]:
    """What to say of documents that tell of communication, but of no rank whose times are here."""
    timed = {rank.rank for rank in ranks}
    return [
        f"{companion.source} was not used: "
        + (
            "its rank is unknown; put it into the file name, as in rank3.json."
            if companion.rank is None
            else f"no file contains times of rank {companion.rank}."
        )
        for companion in companions
        if companion.rank not in timed
    ]


def _align(job: Job) -> tuple[dict[str, dict[int, ClockFit]], list[str]]:
    """Bring everybody's events onto the first worker's clock."""
    clock_of = {rank: _clock(one, f"rank {rank}") for rank, one in sorted(job.workers.items())}
    names = list(dict.fromkeys(clock_of.values()))
    fits = {names[0]: ClockFit()}
    notes = []
    if len(names) > 1:
        on_devices = frozenset(rank for rank, worker in job.workers.items() if worker.on_device)
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
    steps = set.intersection(*(worker.events.whole_steps for worker in job.workers.values()))
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
