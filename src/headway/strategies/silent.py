"""Who is lost: ranks that meet a failure together say so in the job's store, and name those who do not."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from headway import torch_private

PATIENCE_S = 5.0
"""In which every rank that is left says that it met the failure: all meet it at about the same time."""
PAUSE_S = 0.05


def silent_ranks(key: str, ranks: Sequence[int], *, decides: bool = True) -> tuple[int, ...]:
    """Those of ``ranks`` that do not call this within ``PATIENCE_S``: lost, stopped or cut off. The same on all ranks.

    None where all call it, or where the store of the job is gone and no rank kept it. ``key`` is the failure's own. A
    rank that knows of others that may not meet the failure so soon does not decide: it waits for the word of one that
    does.
    """
    rank = dist.get_rank()
    store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
    verdict = _verdict(key)
    try:
        store.set(f"{key}/met/{rank}", "")
        deadline = time.monotonic() + PATIENCE_S * (1 if decides else 2)
        silent = [other for other in ranks if other != rank]
        while silent and time.monotonic() < deadline and not store.check([verdict]):
            time.sleep(PAUSE_S)
            silent = [other for other in silent if not store.check([f"{key}/met/{other}"])]
        found = json.dumps(silent if decides else [])  # those who fail in turn need not wait as long
        return tuple(json.loads(store.compare_set(verdict, "", found)))
    except RuntimeError:  # where a rank keeps the store, it is that one
        return (0,) if store.is_kept_by_rank_0 and rank != 0 and 0 in ranks else ()


def gives_up(key: str) -> None:
    """This rank is the one that is lost: it ends for a reason of its own."""
    with suppress(RuntimeError):  # the store has gone
        store = torch_private.default_store(torch_private.SHORT_LIMIT_S)
        store.compare_set(_verdict(key), "", json.dumps([dist.get_rank()]))


def in_words(ranks: Sequence[int], nobody: str = "another rank") -> str:
    """What is said of the ranks that are lost."""
    if len(ranks) > 1:
        return f"ranks {', '.join(map(str, ranks))} have ended or cannot be reached"
    return f"{f'rank {ranks[0]}' if ranks else nobody} has ended or cannot be reached"


def _verdict(key: str) -> str:
    return f"{key}/silent"
