"""Finding and opening what is to be imported: a file, a folder, or an archive; gzip unpacked, all bounded."""

from __future__ import annotations

import codecs
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from lzma import LZMAError
from pathlib import Path
from typing import IO

from headway.errors import TraceError
from headway.interop.readers import archives
from headway.interop.readers.foreign import Document
from headway.interop.readers.formats import SNIFFED_BYTES
from headway.trace.rank_columns import TO_RAISE_IT, most_bytes, pieces

MAX_DOCUMENTS = 100_000
MAX_DOCUMENT_BYTES = 4 * 2**30
_BROKEN = (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, LZMAError)
# What zipfile and tarfile raise besides of passwords, unknown methods, and offsets and names that cannot be.
_CLOSED = (*_BROKEN, RuntimeError, ValueError, LookupError, ArithmeticError, struct.error, AssertionError)


@dataclass(frozen=True)
class Found:
    """A file that may hold a document. ``open`` gives its bytes as stored; ``path`` is None inside archives."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]]
    path: Path | None = None


class Sources:
    """What ``source`` holds. A context: archives stay open inside it. ``left_out`` says what was refused, leniently."""

    def __init__(self, source: Path, *, lenient: bool = False) -> None:
        self._source = source
        self._lenient = lenient
        self._stack = ExitStack()
        self.left_out: list[str] = []

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_details: object) -> None:
        self._stack.close()

    def find(self) -> list[Found]:
        """Every regular file of the source, in the order of their names.

        Raises TraceError where there is none, or an archive is damaged or has members that would lie outside of it.
        """
        source = self._source
        try:
            if source.is_dir():
                found = list(self._in_folder(source))
            elif source.name.lower().endswith(archives.ENDINGS) and source.is_file():
                found = list(self._in_archive(source))
            elif source.is_file():
                found = [on_disk(source)]
            else:
                raise TraceError("nothing to import", got=source, expected="a file or a folder that exists")
        except OSError as failure:
            raise TraceError(f"{source} cannot be read", got=failure.strerror or failure) from None
        if not found:
            left_out = f" that can be read; left out: {self.left_out[0]}" if self.left_out else ""
            raise TraceError("nothing to import", got=f"{source}, which holds no file{left_out}")
        return sorted(found, key=lambda one: _natural(one.name))

    def _in_folder(self, folder: Path) -> Iterator[Found]:
        number = 0
        for parent, folders, names in os.walk(folder, onerror=self._unreadable):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = Path(parent, name)
                if path.is_file() and not name.startswith("."):
                    _check_count(number, folder)
                    number += 1
                    yield on_disk(path)

    def _unreadable(self, failure: OSError) -> None:
        if not self._lenient:
            raise failure
        self.left_out.append(f"{shown(failure.filename)} cannot be read: {failure.strerror}.")

    def _in_archive(self, path: Path) -> Iterator[Found]:
        try:
            for number, member in enumerate(archives.members(path, self._stack)):
                _check_count(number, path)
                if member.refused:
                    self._refuse(f"{path} has a member that {member.refused}", shown(member.name))
                else:
                    yield Found(f"{path}:{shown(member.name)}", member.size_bytes, member.open)
        except _CLOSED as failure:
            if isinstance(failure, TraceError):
                raise
            self._refuse(f"{path} is damaged", failure)

    def _refuse(self, what: str, got: object) -> None:
        refusal = TraceError(
            what, got=got, fix="Make the archive again, or pass --lenient to leave that out."
        )
        if not self._lenient:
            raise refusal
        self.left_out.append(str(refusal))


def head_of(found: Found) -> bytes:
    """The first SNIFFED_BYTES bytes, unpacked; fewer where the file is damaged.

    Raises TraceError where none can be read.
    """
    head = bytearray()
    with _opened(found) as file:
        try:
            for piece in pieces(file):
                head += piece
                if len(head) >= SNIFFED_BYTES:
                    break
        except _BROKEN:
            if not head:
                raise
    return _utf8(bytes(head[:SNIFFED_BYTES]))


def read_document(found: Found, *, lenient: bool = False) -> Document:
    """Read a file whole, unpacked where it is gzip.

    Raises TraceError where it cannot be read, or unpacks to more than a trace does. What is wrong with its end
    stands in the document, for readers to judge.
    """
    limit_bytes = min(MAX_DOCUMENT_BYTES, most_bytes(found.size_bytes))
    data = BytesIO()  # gives what it holds without another copy
    ending = ""
    with _opened(found) as file:
        try:
            for piece in pieces(file):
                if data.tell() + len(piece) > limit_bytes:
                    raise TraceError(
                        f"{found.name} is too large for a trace",
                        got=f"more than {limit_bytes} bytes from {found.size_bytes}",
                        fix=TO_RAISE_IT,
                    )
                data.write(piece)
        except EOFError:
            ending = "the file is truncated"
        except _BROKEN as failure:
            ending = f"the file is damaged ({failure})"
    return Document(found.name, _utf8(data.getvalue()), ending, lenient)


def _utf8(data: bytes) -> bytes:
    """Text with a byte order mark, as Windows writes it, in UTF-8 without one; everything else as it is."""
    if data.startswith(codecs.BOM_UTF8):
        return data[len(codecs.BOM_UTF8) :]
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace").encode()
    return data


@contextmanager
def _opened(found: Found) -> Iterator[IO[bytes]]:
    """Open a file; what goes wrong inside of the block becomes a TraceError too."""
    try:
        with found.open() as file:
            yield file
    except (*_CLOSED, OSError) as failure:
        if isinstance(failure, TraceError):
            raise
        reason = getattr(failure, "strerror", None) or str(failure) or "a truncated file"
        raise TraceError(f"{found.name} cannot be read", got=reason) from None


def on_disk(path: Path) -> Found:
    """A file by itself. Raises OSError where it is not there."""
    return Found(shown(path), path.stat().st_size, lambda: path.open("rb"), path)


def shown(name: object) -> str:
    """A file's name as text that can be written: bytes of it that are no text are spelt out."""
    return str(name).encode(errors="backslashreplace").decode()


def _check_count(number: int, where: Path) -> None:
    if number >= MAX_DOCUMENTS:
        raise TraceError(f"{where} holds too many files", got=f"more than {MAX_DOCUMENTS}")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts rank 10 after rank 9."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for character in f"{name}\0":
        if character.isascii() and character.isdigit() and len(digits) < 18:
            digits += character
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, character))
    return parts
