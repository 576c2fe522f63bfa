"""Finding and opening what is to be imported: a file, a folder, or an archive; gzip unpacked, all bounded."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from headway.errors import TraceError
from headway.trace.readers.foreign import Document
from headway.trace.readers.formats import SNIFFED_BYTES

MAX_DOCUMENTS = 100_000
MAX_DOCUMENT_BYTES = 4 * 2**30
MAX_RATIO = 400  # of what a compressed file may unpack to: traces come to 10 to 40
SMALL_BYTES = 64 * 2**20  # what any file may unpack to, whatever its ratio
_PIECE_BYTES = 16 * 2**20
_GZIP = b"\x1f\x8b"
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Found:
    """A file that may hold a document. ``open`` gives its bytes as they are stored."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]]


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
                found = list(_in_folder(source))
            elif source.name.lower().endswith(_ARCHIVES) and source.is_file():
                found = list(self._in_archive(source))
            elif source.is_file():
                found = [_on_disk(source, str(source))]
            else:
                raise TraceError("nothing to import", got=source, expected="a file or a folder that exists")
        except OSError as failure:
            raise TraceError(f"{source} cannot be read", got=failure.strerror or failure) from None
        if not found:
            raise TraceError("nothing to import", got=f"{source}, which holds no file")
        return sorted(found, key=lambda one: _natural(one.name))

    def _in_archive(self, path: Path) -> Iterator[Found]:
        try:
            members = (
                _zipped(path, self._stack) if path.suffix.lower() == ".zip" else _tarred(path, self._stack)
            )
            for number, (name, size_bytes, opener) in enumerate(members):
                _check_count(number, path)
                if climbs_out(name):
                    self._refuse(f"{path} has a member that would lie outside of it", name)
                else:
                    yield Found(f"{path}:{name}", size_bytes, opener)
        except (*_BROKEN, NotImplementedError, RuntimeError, ValueError) as failure:
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
    """The first SNIFFED_BYTES bytes, unpacked; fewer where the file is damaged, none where it cannot be read."""
    try:
        with found.open() as file:
            start = file.read(SNIFFED_BYTES)
        return zlib.decompressobj(31).decompress(start, SNIFFED_BYTES) if start[:2] == _GZIP else start
    except (*_BROKEN, OSError, RuntimeError, NotImplementedError):
        return b""


def read_document(found: Found, *, lenient: bool = False) -> Document:
    """Read a file whole, unpacked where it is gzip.

    Raises TraceError where it cannot be read, or unpacks to more than a trace does. What is wrong with its end
    stands in the document, for readers to judge.
    """
    limit_bytes = min(MAX_DOCUMENT_BYTES, max(SMALL_BYTES, MAX_RATIO * found.size_bytes))
    try:
        with found.open() as file:
            stored = io.BufferedReader(file) if isinstance(file, io.RawIOBase) else file
            packed = stored.read(2)
            stored.seek(0)
            if packed != _GZIP:
                data, ending = _bounded(stored, limit_bytes, found)
            else:
                with gzip.GzipFile(fileobj=stored) as unpacked:
                    data, ending = _bounded(unpacked, limit_bytes, found)
    except (*_BROKEN, OSError, RuntimeError, NotImplementedError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise TraceError(f"{found.name} cannot be read", got=reason) from None
    return Document(found.name, data, ending, lenient)


def climbs_out(name: str) -> bool:
    """Whether an archive's member would lie outside of the archive's folder if it were unpacked."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or (len(name) > 1 and name[1] == ":")


def _bounded(file: IO[bytes] | gzip.GzipFile, limit_bytes: int, found: Found) -> tuple[bytes, str]:
    pieces: list[bytes] = []
    total_bytes = 0
    try:
        while piece := file.read(_PIECE_BYTES):
            total_bytes += len(piece)
            if total_bytes > limit_bytes:
                raise TraceError(
                    f"{found.name} unpacks to far more than a trace does",
                    got=f"more than {limit_bytes} bytes from {found.size_bytes}",
                    expected=f"at most {MAX_RATIO} times as much, and {MAX_DOCUMENT_BYTES} bytes",
                )
            pieces.append(piece)
    except EOFError:
        return b"".join(pieces), "the compressed file is truncated"
    except (zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as failure:
        return b"".join(pieces), f"the compressed file is damaged ({failure})"
    return b"".join(pieces), ""


def _on_disk(path: Path, name: str) -> Found:
    return Found(name, path.stat().st_size, lambda: path.open("rb"))


def _in_folder(folder: Path) -> Iterator[Found]:
    number = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if path.is_file() and not name.startswith("."):
                _check_count(number, folder)
                number += 1
                yield _on_disk(path, str(path))


_Member = tuple[str, int, Callable[[], IO[bytes]]]


def _zipped(path: Path, stack: ExitStack) -> Iterator[_Member]:
    archive = stack.enter_context(zipfile.ZipFile(path))
    for info in archive.infolist():
        if not info.is_dir():
            yield info.filename, info.compress_size, partial(archive.open, info)


def _tarred(path: Path, stack: ExitStack) -> Iterator[_Member]:
    archive = stack.enter_context(tarfile.open(path))  # noqa: SIM115 - the stack closes it
    limit_bytes = max(SMALL_BYTES, MAX_RATIO * path.stat().st_size)
    for info in archive:
        if (
            info.offset_data + info.size > limit_bytes
        ):  # before the archive is read on to find the next member
            raise TraceError(
                f"{path} unpacks to far more than traces do",
                got=f"a member of {info.size} bytes",
                expected=f"at most {limit_bytes} bytes in all",
            )
        if info.isfile():
            yield info.name, info.size, partial(_member, archive, info)


def _member(archive: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(info)
    assert file is not None  # it is a regular file
    return file


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
