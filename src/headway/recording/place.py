"""Where the rank files of one recording go: a folder that rank 0 makes, or a local one for ranks that do not see it.

Every attempt of a job (a restart by torchrun, another group) is a recording of its own, in a folder of its own below
the one that its launcher made, so that files of two attempts never mix.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from headway import files, torch_private
from headway.errors import UserError
from headway.recording import collecting
from headway.rpc.interface import host_name

KEY = "headway/recording"
DESCRIPTION = "recording.json"
ATTEMPT = "attempt-"
ELSEWHERE = "elsewhere-"
PATIENCE = timedelta(seconds=60)
SEEN_WITHIN_S = 3.0  # network file systems show new files late


class Recording(BaseModel):
    """What rank 0 says of one recording, in the job's store and in its folder."""

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
    """Where one rank writes, and whether rank 0's launcher finds it there."""

    recording: Recording
    folder: Path
    shared: bool


def agree_on_place(folder: Path, output: Path | None) -> Place:
    """Make, or find, the folder for this rank's file.

    ``folder`` is the one this rank's launcher made and ``output`` where it would write the trace. Needs the default
    group.
    """
    store = torch_private.default_store()
    rank = dist.get_rank()
    if rank == 0:
        try:
            recording = _begun(folder, output)
        except Exception:
            store.set(KEY, "")  # others need not wait
            raise
        store.set(KEY, recording.model_dump_json())
        return Place(recording, recording.folder, shared=True)
    store.wait([KEY], PATIENCE)
    recording = Recording.model_validate_json(store.get(KEY))
    place = Place(recording, recording.folder, shared=True)
    if not _sees(recording):
        place = Place(recording, folder / recording.folder.name, shared=False)
        place.folder.mkdir(parents=True, exist_ok=True)
        collecting.announce(recording.token, rank)
    if recording.folder.parent != folder or not place.shared:
        note = {"recording": recording.model_dump(mode="json"), "shared": place.shared}
        files.write_text(folder / f"{ELSEWHERE}{recording.token}.json", json.dumps(note))
    return place


def elsewhere(folder: Path) -> tuple[Recording, bool] | None:
    """Where ranks of this launcher, whose folder is given, found rank 0 to record, and whether they see its folder.

    None where rank 0 was this launcher's own in the newest attempt, or no rank began to record.
    """
    notes = []
    for path in folder.glob(f"{ELSEWHERE}*.json"):
        try:
            document = json.loads(files.read_text(path, UserError, "recording", 65_536))
            notes.append((Recording.model_validate(document["recording"]), document["shared"] is True))
        except (ValueError, KeyError, TypeError):
            continue
    own = [description.started_s for each in folder.glob(f"{ATTEMPT}*") if (description := described(each))]
    newest = max(notes, key=lambda note: note[0].started_s, default=None)
    return None if newest is None or max(own, default=0.0) > newest[0].started_s else newest


def described(folder: Path) -> Recording | None:
    """What rank 0 said of the recording in ``folder``; None for a folder that no rank 0 made."""
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
    """Whether this rank and rank 0 mean the same folder by its path."""
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
