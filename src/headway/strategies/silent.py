"""Finds lost ranks after a failure: ranks that are alive report in the job's store, the others are named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from headway import torch_private

PATIENCE_S = 5.0
"""Time in which all live ranks report, since they fail at about the same time."""
GRACE_S = 1.0
"""Time in which a neighbour that closed its connections because of the failure reports."""
LINGER_S = 1.0
"""Time for other ranks to read the result before rank 0, which hosts the store, exits."""
PAUSE_S = 0.05


def silent_ranks(
    key: str, ranks: Sequence[int], *, neighbour: int | None = None, decides: bool = True
) -> tuple[int, ...]:
    """Return those of ``ranks`` that do not call this after a failure: lost, stopped or cut off. Same on all ranks.

    ``neighbour`` closed a connection: it is lost unless it calls this too. Without one, all ranks have ``PATIENCE_S`` to
    call. The result is empty if all call, or if the job's store is gone and no rank hosted it. ``key`` identifies the
    failure. With ``decides`` False, because other ranks may notice the failure later, a rank waits for the decision of
    another.
    """
    rank = dist.get_rank()
    store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
    verdict = _verdict(key)

    def called(peer: int) -> bool:
        return store.check([f"{key}/met/{peer}"])

    def wait_for(what: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not (is_so := what()) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        return is_so

    peers = [peer for peer in ranks if peer != rank]
    try:
        store.set(f"{key}/met/{rank}", "")
        silent: Sequence[int] = ()
        if neighbour is not None and not wait_for(
            lambda: store.check([verdict]) or called(neighbour), GRACE_S
        ):
            silent = (neighbour,)
        elif decides and neighbour is None:
            wait_for(lambda: store.check([verdict]) or all(map(called, peers)), PATIENCE_S)
            silent = [peer for peer in peers if not called(peer)]
        else:
            wait_for(lambda: store.check([verdict]), 2 * PATIENCE_S)
        agreed = tuple(json.loads(store.compare_set(verdict, "", json.dumps(silent))))
    except RuntimeError:  # the rank that hosts the store is lost
        return (0,) if store.is_kept_by_rank_0 and rank != 0 and 0 in ranks else ()
    if rank == 0 and peers and store.is_kept_by_rank_0:
        time.sleep(LINGER_S)
    return agreed


def gives_up(key: str) -> None:
    """Report this rank as the lost one: it ends for a reason of its own."""
    with suppress(RuntimeError):  # the store has gone
        store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
        store.compare_set(_verdict(key), "", json.dumps([dist.get_rank()]))


def in_words(ranks: Sequence[int], nobody: str = "another rank") -> str:
    """Describe the lost ranks."""
    if len(ranks) > 1:
        return f"ranks {', '.join(map(str, ranks))} have ended or cannot be reached"
    return f"{f'rank {ranks[0]}' if ranks else nobody} has ended or cannot be reached"


def _verdict(key: str) -> str:
    return f"{key}/silent"
