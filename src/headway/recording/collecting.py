"""Rank files of hosts that do not see rank 0's folder: sent to rank 0 over the job's own store, in bounded pieces."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from headway import files, torch_private
from headway.errors import TraceError

FILES_KEY = "headway/files"
PIECE_BYTES = 2**20
PIECES_AHEAD = 4  # that a store holds of a rank at most
MAX_FILE_BYTES = 4 * 2**30
_NAME = re.compile(r"(rank-\d{5,6}\.parquet|status-\d{5,6}\.json)\Z")


def announce(token: str, rank: int) -> None:
    """Tell rank 0, before training, that ``rank`` is going to send the file of the recording ``token``."""
    store = torch_private.default_store()
    store.set(f"{FILES_KEY}/{token}/sender/{store.add(f'{FILES_KEY}/{token}/senders', 1) - 1}", str(rank))


def send(token: str, rank: int, folder: Path, patience_s: float) -> None:
    """Send what ``rank`` wrote into ``folder``. Raises RuntimeError where rank 0 takes nothing for ``patience_s``."""
    store = torch_private.default_store()
    path = next(
        path for path in sorted(folder.iterdir()) if _NAME.match(path.name) and f"-{rank:05d}." in path.name
    )
    key, taken = _keys(token, rank)
    store.set(key, f"{path.name} {path.stat().st_size}")
    count = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            if count >= PIECES_AHEAD:
                store.wait([f"{taken}/{count - PIECES_AHEAD}"], timedelta(seconds=patience_s))
            store.set(f"{key}/{count}", piece)
            count += 1
    store.wait([f"{taken}/{count - 1}"], timedelta(seconds=patience_s))


def receive(token: str, folder: Path, patience_s: float) -> tuple[int, ...]:
    """On rank 0: put every file that ranks announced into ``folder``; returns the ranks whose file came.

    Waits up to ``patience_s`` for each piece; a rank that is gone is left out.
    """
    store = torch_private.default_store()
    came = []
    for number in range(store.add(f"{FILES_KEY}/{token}/senders", 0)):
        rank = int(store.get(f"{FILES_KEY}/{token}/sender/{number}"))
        try:
            _receive_one(store, token, rank, folder, timedelta(seconds=patience_s))
        except (RuntimeError, TraceError):  # a RuntimeError where nothing came in time
            continue
        came.append(rank)
    return tuple(came)


def _receive_one(store: Any, token: str, rank: int, folder: Path, patience: timedelta) -> None:
    key, taken = _keys(token, rank)
    store.wait([key], patience)
    name, _, size = store.get(key).decode(errors="replace").partition(" ")
    if not _NAME.match(name) or not size.isdecimal() or not 0 < int(size) <= MAX_FILE_BYTES:
        raise TraceError("the announcement of a rank's file cannot be read", got=f"{name} {size}")
    with files.file_written_whole(folder / name, TraceError) as file:
        for number in range(-(-int(size) // PIECE_BYTES)):
            store.wait([f"{key}/{number}"], patience)
            file.write(store.get(f"{key}/{number}"))
            store.delete_key(f"{key}/{number}")
            store.set(f"{taken}/{number}", "")


def _keys(token: str, rank: int) -> tuple[str, str]:
    return f"{FILES_KEY}/{token}/{rank}", f"{FILES_KEY}/{token}/{rank}/taken"
