"""What a rank of a pipeline raises whose neighbour is gone: the same rank is named on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, HeadwayError, one_line

_KEY = "headway/pipeline/lost"
_PATIENCE = timedelta(seconds=10)  # in which a rank that waits for a message of the lost one notices
_NOBODY_KNOWS = "-"
_CONNECTION = "gloo"  # in what it raises where a connection is gone


@contextlib.contextmanager
def named(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """Raise CommunicationError instead of what ``group`` raises in here, where ``what`` is done with ``neighbour``.

    Whoever loses a neighbour first says so to all, and ends its own connections: those who wait for it fail in turn,
    and name the rank that was lost first rather than the one that raised because of it.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        rank, lost = dist.get_rank(), _first_lost(dist.get_global_rank(group, neighbour))
        with contextlib.suppress(RuntimeError):
            torch_private.abort_group(group)
        raise CommunicationError(
            f"rank {rank}: {what} failed: rank {lost} has ended or cannot be reached "
            f"({one_line(str(failure), 200)}). Restart the job from its last checkpoint."
        ) from failure


@contextlib.contextmanager
def among(what: str, ranks: Sequence[int] = (), group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise CommunicationError where a connection is gone in here: ``ranks``, by default all, do ``what`` together.

    A collective does not say which of several ranks it has lost: one that misses its neighbour does. ``group`` are
    those who wait for this rank, and whose connections to it end.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        said = _of_connection(failure)
        if said is None:
            raise
        rank = dist.get_rank()
        others = [each for each in ranks or range(dist.get_world_size()) if each != rank]
        lost = _first_lost(others[0]) if len(others) == 1 else _told()
        if group is not None:
            with contextlib.suppress(RuntimeError):
                torch_private.abort_group(group)
        who = "another rank" if lost is None else f"rank {lost}"
        raise CommunicationError(
            f"rank {rank}: {what} failed: {who} has ended or cannot be reached "
            f"({one_line(said, 200)}). Restart the job from its last checkpoint."
        ) from failure


@contextlib.contextmanager
def leaving(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """As ``named``, for failures of connections alone; of any other this rank says that it is the one that is lost."""
    try:
        yield
    except RuntimeError as failure:
        if _CONNECTION in str(failure).lower():
            with named(group, neighbour, what):
                raise
        _first_lost(dist.get_rank())
        raise


def _of_connection(failure: BaseException) -> str | None:
    """What a failure, or one that it came of, says of a connection: torch wraps what a stage's backward raises."""
    found: BaseException | None = failure
    while found is not None:
        if _CONNECTION in str(found).lower():
            return str(found)
        found = found.__cause__ or found.__context__
    return None


def _told() -> int | None:
    """The rank that somebody has missed first; None where nobody says so in time."""
    store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
    with contextlib.suppress(RuntimeError):
        store.wait([_KEY], _PATIENCE)
    try:
        text = store.compare_set(
            _KEY, "", _NOBODY_KNOWS
        ).decode()  # those who fail in turn need not wait as long
    except RuntimeError:
        return None
    return int(text) if text.isdigit() else None


def _first_lost(neighbour: int) -> int:
    """The rank that was missed first; ``neighbour`` where the store of the job is gone as well."""
    try:
        said: bytes = torch_private.default_store(torch_private.SHORT_LIMIT_S).compare_set(
            _KEY, "", str(neighbour)
        )
    except RuntimeError:
        return neighbour
    text = said.decode()
    return int(text) if text.isdigit() else neighbour
