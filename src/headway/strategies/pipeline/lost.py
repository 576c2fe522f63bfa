"""What a rank of a pipeline raises whose neighbour is gone: the same rank is named on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, HeadwayError, one_line

_KEY = "headway/pipeline/lost"
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


def _first_lost(neighbour: int) -> int:
    """The rank that was missed first; ``neighbour`` where the store of the job is gone as well."""
    try:
        said: bytes = torch_private.default_store().compare_set(_KEY, "", str(neighbour))
    except RuntimeError:
        return neighbour
    text = said.decode()
    return int(text) if text.isdigit() else neighbour
