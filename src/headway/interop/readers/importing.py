"""Imports other tools' recordings of a job as a Headway trace."""

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
from headway.interop.readers.formats import FORMATS, Format
from headway.interop.readers.numbering import number_collectives
from headway.interop.readers.ranks import Job, settle
from headway.model import ModelSpec
from headway.trace.folder import write_trace
from headway.trace.format import ClockFit, Manifest, RankInfo

COMPANIONS = ("flight-recorder", "execution-trace")  # formats that only add to what another one says
WORTH_BYTES = 128 * 2**20  # of unpacked documents: starting processes for less takes longer than reading
USUAL_RATIO = 13  # of what a packed document unpacks to
MOST_WORKERS = 8
SAFE_PATH = "PYTHONSAFEPATH"  # Python's own, which is what its option -P is
AHEAD = 2  # documents that each process has before it

Documents = Sequence[tuple[Found, Format]]
Waiting = Future[Reading | TraceError]


@dataclass
class Read:
    """The contents of all documents. ``refused`` says why some were skipped under ``lenient``."""

    ranks: list[ForeignRank] = field(default_factory=list)
    companions: list[Companion] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def read_all(
    documents: Documents, *, lenient: bool, workers: int, progress: Callable[[int, int], None]
) -> Read:
    """Read ``documents`` with up to ``workers`` processes; small inputs are read in this process.

    Raises TraceError for the first unreadable document, unless ``lenient`` and there are several.
    """
    done = Read()
    companions = [(file, chosen) for file, chosen in documents if chosen.name in COMPANIONS]
    recordings = [(file, chosen) for file, chosen in documents if chosen.name not in COMPANIONS]
    tolerant = lenient and len(documents) > 1
    count = 0
    for outcome in _outcomes(companions, [], lenient, 1):
        _take(done, outcome, tolerant)
        progress(count := count + 1, len(documents))
    for outcome in _outcomes(recordings, done.companions, lenient, workers):
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
    """Read each document, in order; failures are yielded, not raised."""
    on_disk_all = all(file.path is not None for file, _ in documents)
    much = sum(_unpacked_bytes(file) for file, _ in documents) >= WORTH_BYTES
    if min(workers, len(documents)) < 2 or not on_disk_all or not much:
        for file, chosen in documents:
            yield _outcome(file, chosen, companions, lenient)
        return
    yield from _side_by_side(documents, companions, lenient, min(workers, len(documents), MOST_WORKERS))


def _side_by_side(
    documents: Documents, companions: Sequence[Companion], lenient: bool, workers: int
) -> Iterator[Reading | TraceError]:
    """Read in parallel: this process from the front of the list, ``workers - 1`` others from its end."""
    left, handed_out = deque(documents), deque[tuple[Found, Waiting]]()
    at_work: list[Waiting] = []
    ahead = AHEAD * (workers - 1)
    # Not forked: this process may have threads, which a fork would leave behind with their locks held.
    with _safe_path():
        opened = ProcessPoolExecutor(workers - 1, mp_context=get_context("spawn"))
    with opened as pool:
        try:
            while left:
                at_work = [future for future in at_work if not future.done()]
                # Nothing is handed out to be taken back: a pool that breaks while one of its futures is cancelled
                # never answers (Python 3.11).
                while left and len(at_work) < ahead:
                    file, chosen = left.pop()
                    try:
                        with _safe_path():
                            waiting = pool.submit(
                                _read_apart, file.path, chosen.name, tuple(companions), lenient
                            )
                    except BrokenProcessPool:
                        left.append((file, chosen))
                        ahead = 0
                        break
                    at_work.append(waiting)
                    handed_out.appendleft((file, waiting))
                if left:
                    yield _outcome(*left.popleft(), companions, lenient)
            for file, waiting in handed_out:
                yield _result(file, waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep processes started within the block from importing modules of the current folder."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _result(file: Found, waiting: Waiting) -> Reading | TraceError:
    try:
        return waiting.result()
    except (BrokenProcessPool, OSError):  # killed for want of memory, or the file is gone
        return TraceError(
            f"{file.name} could not be read", got="its reader process died", fix="Import it on its own."
        )


def _unpacked_bytes(file: Found) -> int:
    return file.size_bytes * (USUAL_RATIO if file.name.endswith(".gz") else 1)


def _outcome(
    file: Found, chosen: Format, companions: Sequence[Companion], lenient: bool
) -> Reading | TraceError:
    try:
        return chosen.read(read_document(file, lenient=lenient), companions)
    except TraceError as failure:
        return failure
    except MemoryError:
        return TraceError(f"{file.name} does not fit into memory", got=f"{file.size_bytes} bytes")


def _read_apart(
    path: Path | None, format_name: str, companions: Sequence[Companion], lenient: bool
) -> Reading | TraceError:
    """Read one document in a worker process."""
    assert path is not None
    chosen = next(candidate for candidate in FORMATS if candidate.name == format_name)
    return _outcome(on_disk(path), chosen, companions, lenient)


AUTO = "auto"


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    manifest: Manifest
    formats: dict[str, int]  # number of documents by format
    left_out: tuple[str, ...]  # names of files in an unknown format


def import_trace(
    source: Path,
    out: Path,
    *,
    format_name: str = AUTO,
    lenient: bool = False,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Imported:
    """Import the recordings in ``source`` (a file, folder or archive) and write them to the new folder ``out``.

    ``format_name`` is one of FORMATS, or AUTO. ``lenient`` salvages damaged input; the trace's notes say what was
    dropped. ``workers`` processes read in parallel; more than one needs an importable main module, as
    ``multiprocessing`` does. Raises TraceError if nothing can be imported, input is damaged, or ``out`` exists.
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
    notes += number_collectives({rank: recording.events for rank, recording in sorted(job.workers.items())})
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
    files_found: Sequence[Found], format_name: str, unreadable: list[str] | None = None
) -> tuple[list[tuple[Found, Format]], list[str]]:
    """Detect the format of each file; returns the recognised files and the names of the rest.

    Unreadable files are noted in ``unreadable``. Raises TraceError if that is None, or if no file is recognised.
    """
    if format_name != AUTO:
        chosen = next((candidate for candidate in FORMATS if candidate.name == format_name), None)
        if chosen is None:
            raise TraceError(
                "unknown trace format",
                got=format_name,
                expected=", ".join([AUTO, *(candidate.name for candidate in FORMATS)]),
            )
        return [(file, chosen) for file in files_found], []
    recognised_files: list[tuple[Found, Format]] = []
    left_out = []
    for file in files_found:
        try:
            head = head_of(file)
        except TraceError as failure:
            if unreadable is None:
                raise
            unreadable.append(f"Left out: {failure}")
            continue
        recognised = next((candidate for candidate in FORMATS if candidate.recognises(file.name, head)), None)
        if recognised is None:
            left_out.append(file.name)
        else:
            recognised_files.append((file, recognised))
    if not recognised_files:
        raise TraceError(
            "no file has a known trace format",
            got=f"{len(files_found)} file{'s' if len(files_found) > 1 else ''}, such as {files_found[0].name}",
            expected=", ".join(candidate.title for candidate in FORMATS),
            fix="If you know the format, pass it with --format.",
        )
    return _once(recognised_files), left_out


def _once(documents: list[tuple[Found, Format]]) -> list[tuple[Found, Format]]:
    """Drop JSON twins of XSpace files: JAX and TensorFlow write one recording in both forms."""
    xplane_folders = {
        str(PurePath(file.name).parent) for file, chosen in documents if chosen.name == "xplane"
    }
    return [
        (file, chosen)
        for file, chosen in documents
        if chosen.name != "jax" or str(PurePath(file.name).parent) not in xplane_folders
    ]


def _nothing_timed(companions: Sequence[Companion], refused: Sequence[str]) -> TraceError:
    if not companions:
        return TraceError("none of the files could be read", got=refused[0] if refused else "nothing")
    lacks = execution_trace.LACKS if companions[0].kind == "execution_trace" else flight_recorder.LACKS
    return TraceError(f"no file contains times. {lacks}", got=companions[0].source)


def _unused(companions: Sequence[Companion], ranks: Sequence[ForeignRank]) -> list[str]:
    """Notes about companion documents that match no recording."""
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
    """Shift all events onto the first worker's clock."""
    clock_of = {rank: _clock(recording, f"rank {rank}") for rank, recording in sorted(job.workers.items())}
    names = list(dict.fromkeys(clock_of.values()))
    fits = {names[0]: ClockFit()}
    notes = []
    if len(names) > 1:
        on_devices = frozenset(rank for rank, worker in job.workers.items() if worker.on_device)
        meetings = meetings_of(
            {rank: recording.events for rank, recording in job.workers.items()}, clock_of, on_devices
        )
        fits = fit_clocks(meetings, names)
        notes.append(f"{len(names)} clocks were aligned by the ranks' common collectives and messages.")
    for rank, recording in job.workers.items():
        recording.events = aligned(recording.events, fits[clock_of[rank]])
    server_fits = {}
    for server, recording in job.servers.items():
        server_fits[server] = fits.get(_clock(recording, ""), ClockFit())
        recording.events = aligned(recording.events, server_fits[server])
    return {"worker": {rank: fits[clock] for rank, clock in clock_of.items()}, "server": server_fits}, notes


def _clock(recording: ForeignRank, otherwise: str) -> str:
    """The name of a recording's clock: wall clocks are shared by all ranks of a host."""
    return recording.clock or (
        f"host {recording.host}" if recording.host and recording.absolute else otherwise
    )


def _manifest(job: Job, clocks: Mapping[str, Mapping[int, ClockFit]], notes: Sequence[str]) -> Manifest:
    steps = set.intersection(*(worker.events.whole_steps for worker in job.workers.values()))
    if not steps:
        raise TraceError(
            "the ranks have no recorded step in common",
            got={
                rank: sorted(recording.events.whole_steps)[:4]
                for rank, recording in list(job.workers.items())[:4]
            },
            expected="at least one step recorded by every rank",
            fix="Import recordings of the same steps.",
        )
    missing = job.world_size - len(job.workers)
    return Manifest(
        framework=next(iter(job.workers.values())).framework,
        world_size=job.world_size,
        steps=tuple(sorted(steps)),
        ranks=tuple(
            _info(rank, recording, job, clocks["worker"][rank])
            for rank, recording in sorted(job.workers.items())
        ),
        servers=tuple(
            _info(rank, recording, job, clocks["server"][rank])
            for rank, recording in sorted(job.servers.items())
        ),
        groups={
            name: members for recording in job.workers.values() for name, members in recording.groups.items()
        },
        notes=tuple(
            dict.fromkeys(
                one_line(note, limit=1000)
                for note in [
                    *([f"{missing} of {job.world_size} ranks are not in this trace."] if missing else []),
                    *job.notes,
                    *notes,
                    *_rank_notes(job),
                ]
            )
        ),
    )


def _rank_notes(job: Job) -> list[str]:
    """The readers' notes, each once, with its ranks unless it applies to all of them."""
    ranks_of_note: dict[str, list[str]] = {}
    for role, ranks in (("rank", job.workers), ("server", job.servers)):
        for rank, recording in sorted(ranks.items()):
            for note in recording.notes:
                ranks_of_note.setdefault(note, []).append(f"{role} {rank}")
    everybody = len(job.workers) + len(job.servers)
    return [
        note if len(of) == everybody else f"{', '.join(of[:4])}{' and more' if len(of) > 4 else ''}: {note}"
        for note, of in ranks_of_note.items()
    ]


def _info(rank: int, recording: ForeignRank, job: Job, clock: ClockFit) -> RankInfo:
    return RankInfo(
        rank=rank,
        host=one_line(recording.host) or f"{recording.role}{rank}",
        world_size=job.world_size,
        backend=one_line(recording.backend),
        version=one_line(recording.version),
        source=recording.source,
        clock=clock,
        device=one_line(recording.device)[:200],
        dropped_events=recording.dropped_events,
    )
