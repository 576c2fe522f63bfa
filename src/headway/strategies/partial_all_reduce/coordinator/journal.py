"""Write-ahead journal of a coordinator, from which another one resumes after a crash.

A line is the CRC-32 of a JSON document, and the document. The first is a snapshot of the ledger; each further one is an
event and its answers. Every line is written before its answers are sent, so it survives a killed process. Lines with
decisions are also synced to disk (fsync) first, so decisions that a worker has received, and all lines before them,
survive a power loss. A torn last line is dropped: its answers were never sent. A journal that has grown is replaced by
a new snapshot.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from headway import files
from headway.errors import UserError
from headway.strategies.partial_all_reduce.coordinator.ledger import (
    Answer,
    AnyEvent,
    Event,
    Ledger,
    MakeGenerator,
    Snapshot,
)
from headway.strategies.partial_all_reduce.coordinator.messages import GroupStart

FORMAT = 1
MAX_BYTES = 512 * 2**20
COMPACT_BYTES = 16 * 2**20
"""From this size on, a journal twice as large as its first snapshot is replaced by a new snapshot."""
_OWNER_ONLY = 0o600


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    headway_journal: int
    generator: str
    snapshot: Snapshot


class JournalError(UserError):
    """A journal is damaged, in use, or belongs to another generator."""


class Journal:
    """A journal that is open and locked against other coordinators."""

    def __init__(self, path: Path, generator: str) -> None:
        """Lock the journal at ``path`` for ``generator``, its description. Raises JournalError if it is in use."""
        self.path = path
        self._generator = generator
        self._file = -1
        self._size_bytes = self._compact_at_bytes = 0
        self._lock = self._locked()

    def open(self, make_generator: MakeGenerator, job: str) -> Ledger:
        """Restore the ledger from the journal; without a journal, start the job named ``job``.

        Raises JournalError if the journal is damaged or belongs to another generator.
        """
        if not self.path.exists():
            ledger = Ledger(make_generator, job)
            try:
                self.compact(ledger)
            except OSError as failure:
                raise JournalError(
                    f"the journal {self.path} cannot be written", got=failure.strerror
                ) from None
            return ledger
        lines, size_bytes = self._lines()
        ledger = self._replayed(lines, make_generator)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(self._file, size_bytes)
        self._size_bytes = size_bytes
        self._compact_at_bytes = max(COMPACT_BYTES, 2 * len(lines[0]))
        return ledger

    def append(self, event: AnyEvent, answers: Sequence[Answer]) -> None:
        """Write an event and its answers. Raises OSError if that fails."""
        self._write({"event": event.model_dump(mode="json"), "led_to": _led_to(answers)})

    def sync(self) -> None:
        """Sync all lines to disk. Raises OSError if that fails."""
        os.fsync(self._file)

    @property
    def is_due(self) -> bool:
        """Whether the journal has grown enough to be compacted."""
        return self._size_bytes >= self._compact_at_bytes

    def compact(self, ledger: Ledger) -> None:
        """Replace all lines with a snapshot of ``ledger``. Raises OSError if that fails."""
        header = _Header(headway_journal=FORMAT, generator=self._generator, snapshot=ledger.snapshot())
        new = self.path.with_name(f".{self.path.name}.new")
        before = self._file
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, _OWNER_ONLY)
        self._size_bytes = 0
        self._write(header.model_dump(mode="json"))
        os.fsync(self._file)
        new.replace(self.path)
        _sync_folder(self.path.parent)
        self._compact_at_bytes = max(COMPACT_BYTES, 2 * self._size_bytes)
        if before >= 0:
            os.close(before)

    def close(self) -> None:
        """Sync, close and unlock the journal."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _locked(self) -> int:
        try:
            lock = os.open(
                self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, _OWNER_ONLY
            )
        except OSError as failure:
            raise JournalError(
                f"the journal {self.path} cannot be opened", got=failure.strerror,
                fix="Check that the folder exists and is writable.",
            ) from None  # fmt: skip
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise JournalError(
                f"the journal {self.path} is in use", expected="one coordinator per journal",
                fix="Stop the other coordinator first.",
            ) from None  # fmt: skip
        return lock

    def _write(self, document: dict[str, Any]) -> None:
        rest = _line(document)
        self._size_bytes += len(rest)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _lines(self) -> tuple[list[bytes], int]:
        """Return the documents of all complete lines, and their total size."""
        try:
            with files.open_regular(self.path, JournalError, "the journal") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as failure:
            raise JournalError(f"the journal {self.path} cannot be read", got=failure.strerror) from None
        if len(data) > MAX_BYTES:
            raise JournalError(f"the journal {self.path} is too large", expected=f"at most {MAX_BYTES} bytes")
        *complete, _ = data.split(b"\n")
        documents: list[bytes] = []
        size_bytes = 0
        for number, line in enumerate(complete):
            document = _document(line)
            if document is None:
                if not documents or any(_document(later) is not None for later in complete[number + 1 :]):
                    raise self._damaged(number)
                break
            documents.append(document)
            size_bytes += len(line) + 1
        if not documents:
            raise self._damaged(0)
        return documents, size_bytes

    def _replayed(self, lines: Sequence[bytes], make_generator: MakeGenerator) -> Ledger:
        try:
            header = _Header.model_validate_json(lines[0])
        except ValidationError:
            raise self._damaged(0) from None
        if header.headway_journal != FORMAT or header.generator != self._generator:
            raise JournalError(
                f"the journal {self.path} belongs to a different coordinator",
                got=f"generator {header.generator}, format {header.headway_journal}",
                expected=f"generator {self._generator}, format {FORMAT}",
                fix="Start the coordinator with its earlier options, or with a new journal.",
            )
        number = 0
        try:
            ledger = Ledger.restored(make_generator, header.snapshot)
            for line in lines[1:]:
                number += 1
                document = json.loads(line)
                event = Event.validate_python(document["event"])
                if _led_to(ledger.apply(event)) != document["led_to"]:
                    raise ValueError("the generator decides differently")
        except (ValueError, LookupError, TypeError, AssertionError, RecursionError):
            raise self._damaged(number) from None
        return ledger

    def _damaged(self, number: int) -> JournalError:
        return JournalError(
            f"the journal {self.path} is damaged at line {number + 1}, or another version of Headway wrote it",
            fix="Start with a new journal; workers rejoin by themselves.",
        )


def _led_to(answers: Sequence[Answer]) -> list[list[Any]]:
    return [
        [answer.number, *(member.worker for member in answer.members)]
        if isinstance(answer, GroupStart)
        else [answer.number, "committed" if answer.committed else "aborted"]
        for answer in answers
    ]


def _line(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _document(line: bytes) -> bytes | None:
    checksum, _, text = line.partition(b" ")
    return text if checksum == b"%08x" % zlib.crc32(text) and text else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
