"""What a rank of a pipeline raises whose neighbour is gone: the same rank is named on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, HeadwayError, one_line
from headway.strategies.silent import gives_up, in_words, silent_ranks

_KEY = "headway/pipeline/lost"
_CONNECTION = "gloo"  # in what it raises where a connection is gone


@contextlib.contextmanager
def named(group: dist.ProcessGroup, neighbour: int, what: str) -> Iterator[None]:
    """Raise CommunicationError instead of what ``group`` raises in here, where ``what`` is done with ``neighbour``.

    Whoever loses a neighbour ends its own connections: those who wait for it fail in turn. All say so, and name the
    ranks that do not.
    """
    try:
        yield
    except HeadwayError:
        raise
    except RuntimeError as failure:
        _abort(group)
        other = dist.get_global_rank(group, neighbour)
        closed = None if _in_vain(str(failure)) else other
        lost = silent_ranks(_KEY, range(dist.get_world_size()), neighbour=closed) or (other,)
        raise CommunicationError(
            f"rank {dist.get_rank()}: {what} failed: {in_words(lost)} "
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
        everyone = range(dist.get_world_size())
        others = [each for each in ranks or everyone if each != rank]
        if group is not None:
            _abort(group)
        waited = _in_vain(said)
        only = others[0] if len(others) == 1 else None
        # Who waits for a rank that is left meets the failure when that ends, unless all wait in vain.
        lost = silent_ranks(_KEY, everyone, neighbour=None if waited else only, decides=waited)
        if not lost and only is not None:
            lost = (only,)
        raise CommunicationError(
            f"rank {rank}: {what} failed: {in_words(lost)} "
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
        gives_up(_KEY)
        raise


def _of_connection(failure: BaseException) -> str | None:
    """What a failure, or one that it came of, says of a connection: torch wraps what a stage's backward raises."""
    found: BaseException | None = failure
    while found is not None:
        if _CONNECTION in str(found).lower():
            return str(found)
        found = found.__cause__ or found.__context__
    return None


def _in_vain(said: str) -> bool:
    """Whether nothing came in time: then all wait at about the same time, and not all for a rank that is lost."""
    return "timed out" in said.lower()


def _abort(group: dist.ProcessGroup) -> None:
    """Have those who wait for this rank in ``group`` meet the failure, too."""
    with contextlib.suppress(RuntimeError):
        torch_private.abort_group(group)
