"""Decides where rank files go: to rank 0's folder, or to a local one from which they are sent to rank 0.

Every attempt of a job (a restart by torchrun, another process group) is a separate recording. It has its own folder
inside the launcher's, so that files of two attempts never mix.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from headway import files, torch_private
from headway.errors import TraceError, UserError
from headway.rpc.interface import host_name

FILES_KEY = "headway/files"
PIECE_BYTES = 2**20
PIECES_AHEAD = 4  # how many pieces of a rank's file the store holds at most
MAX_FILE_BYTES = 4 * 2**30
_NAME = re.compile(r"(rank-\d{5,6}\.parquet|status-\d{5,6}\.json)\Z")


def announce(token: str, rank: int) -> None:
    """Tell rank 0, before training, that ``rank`` will send its file of the recording ``token``."""
    store = torch_private.default_store()
    store.set(f"{FILES_KEY}/{token}/sender/{store.add(f'{FILES_KEY}/{token}/senders', 1) - 1}", str(rank))


def send(token: str, rank: int, folder: Path, patience_s: float) -> None:
    """Send the file that ``rank`` wrote into ``folder``.

    Raises RuntimeError if rank 0 accepts nothing for ``patience_s`` seconds.
    """
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
    """On rank 0: receive every announced file into ``folder``; returns the ranks whose file arrived.

    Waits up to ``patience_s`` seconds for each piece; ranks that have ended are skipped.
    """
    store = torch_private.default_store()
    came = []
    for number in range(store.add(f"{FILES_KEY}/{token}/senders", 0)):
        rank = int(store.get(f"{FILES_KEY}/{token}/sender/{number}"))
        try:
            _receive_one(store, token, rank, folder, timedelta(seconds=patience_s))
        except (RuntimeError, TraceError):  # a RuntimeError if nothing arrived in time
            continue
        came.append(rank)
    return tuple(came)


def _receive_one(store: Any, token: str, rank: int, folder: Path, patience: timedelta) -> None:
    key, taken = _keys(token, rank)
    store.wait([key], patience)
    name, _, size = store.get(key).decode(errors="replace").partition(" ")
    if not _NAME.match(name) or not size.isdecimal() or not 0 < int(size) <= MAX_FILE_BYTES:
        raise TraceError(
            f"rank {rank} announced an invalid file",
            got=f"{name} {size}",
            expected=f"a rank or status file of 1 to {MAX_FILE_BYTES} bytes",
        )
    with files.file_written_whole(folder / name, TraceError) as file:
        for number in range(-(-int(size) // PIECE_BYTES)):
            store.wait([f"{key}/{number}"], patience)
            file.write(store.get(f"{key}/{number}"))
            store.delete_key(f"{key}/{number}")
            store.set(f"{taken}/{number}", "")


def _keys(token: str, rank: int) -> tuple[str, str]:
    return f"{FILES_KEY}/{token}/{rank}", f"{FILES_KEY}/{token}/{rank}/taken"


KEY = "headway/recording"
DESCRIPTION = "recording.json"
ATTEMPT = "attempt-"
ELSEWHERE = "elsewhere-"
PATIENCE = timedelta(seconds=60)
SEEN_WITHIN_S = 3.0  # network file systems show new files late


class Recording(BaseModel):
    """Describes one recording; rank 0 publishes it in the job's store and writes it to the folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str = Field(max_length=64)
    run: str = Field(default="", max_length=256)
    attempt: int = Field(default=0, ge=0)
    world_size: int = Field(ge=1)
    host: str = Field(max_length=256)
    folder: Path
    output: Path | None = None
    started_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """The folder in which one rank writes, and whether rank 0's launcher sees it (``shared``)."""

    recording: Recording
    folder: Path
    shared: bool


def agree_on_place(folder: Path, output: Path | None) -> Place:
    """Create or find the folder for this rank's file. Needs the default process group.

    ``folder`` was created by this rank's launcher; ``output`` is where that launcher would write the trace.
    """
    store = torch_private.default_store()
    rank = dist.get_rank()
    if rank == 0:
        try:
            recording = _begun(folder, output)
        except Exception:
            store.set(KEY, "")  # so that other ranks stop waiting
            raise
        store.set(KEY, recording.model_dump_json())
        return Place(recording, recording.folder, shared=True)
    store.wait([KEY], PATIENCE)
    recording = Recording.model_validate_json(store.get(KEY))
    place = Place(recording, recording.folder, shared=True)
    if not _sees(recording):
        place = Place(recording, folder / recording.folder.name, shared=False)
        place.folder.mkdir(parents=True, exist_ok=True)
        announce(recording.token, rank)
    if recording.folder.parent != folder or not place.shared:
        note = {"recording": recording.model_dump(mode="json"), "shared": place.shared}
        files.write_text(folder / f"{ELSEWHERE}{recording.token}.json", json.dumps(note))
    return place


def recording_elsewhere(folder: Path) -> tuple[Recording, bool] | None:
    """The recording of rank 0 on another host that this launcher's ranks joined, and whether they see its folder.

    ``folder`` is this launcher's. Returns None if the newest attempt's rank 0 belongs to this launcher, or if no rank
    began to record.
    """
    notes = []
    for path in folder.glob(f"{ELSEWHERE}*.json"):
        try:
            document = json.loads(files.read_text(path, UserError, "recording", 65_536))
            notes.append((Recording.model_validate(document["recording"]), document["shared"] is True))
        except (ValueError, KeyError, TypeError):
            continue
    attempts = filter(None, map(read_description, folder.glob(f"{ATTEMPT}*")))
    newest_here_s = max((attempt.started_s for attempt in attempts), default=0.0)
    newest = max(notes, key=lambda note: note[0].started_s, default=None)
    return None if newest is None or newest_here_s > newest[0].started_s else newest


def read_description(folder: Path) -> Recording | None:
    """Read rank 0's description of the recording in ``folder``; None if there is none."""
    try:
        return Recording.model_validate_json(
            files.read_text(folder / DESCRIPTION, UserError, "recording", 65_536)
        )
    except ValueError:
        return None


def _begun(folder: Path, output: Path | None) -> Recording:
    token = os.urandom(8).hex()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    recording = Recording(
        token=token,
        run=os.environ.get("TORCHELASTIC_RUN_ID", "")[:256] or token,
        attempt=int(attempt) if attempt.isdecimal() else 0,
        world_size=dist.get_world_size(),
        host=host_name(),
        folder=folder / f"{ATTEMPT}{token}",
        output=output,
        started_s=time.time(),
    )
    recording.folder.mkdir(parents=True)
    files.write_text(recording.folder / DESCRIPTION, recording.model_dump_json())
    return recording


def _sees(recording: Recording) -> bool:
    """Whether the path of rank 0's folder is the same, writable folder on this rank."""
    deadline = time.monotonic() + (0 if recording.host == host_name() else SEEN_WITHIN_S)
    while True:
        try:
            document = json.loads((recording.folder / DESCRIPTION).read_bytes()[:65_536])
            if document["token"] == recording.token:
                return os.access(recording.folder, os.W_OK)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
