"""Reading many documents: companions first, then the others, side by side where there is much to read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from headway.errors import TraceError, one_line
from headway.interop.readers.document import Found, on_disk, read_document
from headway.interop.readers.foreign import Companion, ForeignRank, Reading
from headway.interop.readers.formats import Reader, readers
from headway.plugins import PluginFaultError, is_own

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
            f"{found.name} could not be read", got="its reader ended", fix="Import it on its own."
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
        return TraceError(f"{found.name} takes more memory than there is", got=f"{found.size_bytes} bytes")
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
