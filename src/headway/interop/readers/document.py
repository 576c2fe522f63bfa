"""Finds and opens the files to import: a file, folder or archive, with gzip unpacked and all sizes bounded."""

from __future__ import annotations

import codecs
import io
import os
import re
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from headway.errors import TraceError
from headway.interop.readers.foreign import Document
from headway.interop.readers.formats import SNIFFED_BYTES
from headway.trace.rank_columns import HOW_TO_RAISE_LIMIT, most_bytes, pieces

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
_HEADER_BYTES = 64 * 2**10  # of one member of a tar: long names and attributes take some hundred
_BLOCK_BYTES = 512
_ENDLESS_NUMBER = re.compile(rb"\d{64}")


@dataclass(frozen=True)
class Member:
    """A member of an archive. ``size_bytes`` is its stored size; ``refused`` says why it must not be read, or ""."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]]
    refused: str = ""


def members(path: Path, stack: ExitStack) -> Iterator[Member]:
    """Iterate over the files in the archive ``path``, which stays open as long as ``stack``.

    Raises TraceError if it would unpack to an implausible size, and zipfile's or tarfile's errors if it is damaged.
    """
    return _zipped(path, stack) if path.suffix.lower() == ".zip" else _tarred(path, stack)


def climbs_out(name: str) -> bool:
    """Whether unpacking a member of this name would write outside the archive's folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or (name[1:2] == ":" and name[0].isalpha())


def _zipped(path: Path, stack: ExitStack) -> Iterator[Member]:
    archive = stack.enter_context(zipfile.ZipFile(path))
    size_bytes = path.stat().st_size
    infos = archive.infolist()
    if sum(info.compress_size for info in infos) > size_bytes:
        raise zipfile.BadZipFile("its members overlap")
    _check_size(path, size_bytes, sum(info.file_size for info in infos))
    for info in infos:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if not info.is_dir() and kind != stat.S_IFDIR:
            opened = partial(archive.open, info)
            yield _member(info.filename, info.compress_size, opened, kind in (0, stat.S_IFREG))


def _tarred(path: Path, stack: ExitStack) -> Iterator[Member]:
    file: IO[bytes] = stack.enter_context(path.open("rb"))
    size_bytes = path.stat().st_size
    ending: Exception | None = None
    if path.suffix.lower() in (".gz", ".tgz"):
        file, ending = _unpacked(path, file, stack)
    headers = _Headers(file)
    archive = tarfile.open(fileobj=headers, mode="r:")  # noqa: SIM115 - there is nothing to close
    for info in archive:
        _check_size(path, size_bytes, info.offset_data + info.size)
        if info.size < 0:
            raise tarfile.ReadError("a member of negative size")
        if not info.isdir():
            regular = info.isreg() and not info.issparse()
            yield _member(info.name, info.size, partial(_slice, file, info.offset_data, info.size), regular)
        headers.member_bytes = 0
    if ending is not None:
        raise ending
    file.seek(archive.offset)
    if file.read(_BLOCK_BYTES).strip(b"\0"):
        raise tarfile.ReadError(f"no member begins at byte {archive.offset}")


def _member(name: str, size_bytes: int, opened: Callable[[], IO[bytes]], regular: bool) -> Member:
    refused = ""
    if climbs_out(name):
        refused = "would unpack outside the archive's folder"
    elif not regular:
        refused = "is not a regular file"
    return Member(name, size_bytes, opened, refused)


def _check_size(path: Path, stored_bytes: int, unpacked_bytes: int) -> None:
    if unpacked_bytes > most_bytes(stored_bytes):
        raise TraceError(
            f"{path} is too large when unpacked",
            got=f"{unpacked_bytes} bytes from {stored_bytes}",
            expected=f"at most {most_bytes(stored_bytes)}",
            fix=HOW_TO_RAISE_LIMIT,
        )


def _unpacked(path: Path, file: IO[bytes], stack: ExitStack) -> tuple[IO[bytes], Exception | None]:
    """Decompress a tar into an anonymous temporary file; also returns the error at its end, if any.

    Members are read in the order of their names; seeking in a compressed file would restart decompression each time.
    """
    unpacked = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    total_bytes = 0
    ending: Exception | None = None
    try:
        for piece in pieces(file):
            total_bytes += len(piece)
            _check_size(path, path.stat().st_size, total_bytes)
            unpacked.write(piece)
    except EOFError:
        ending = EOFError("the compressed file is truncated")
    except zlib.error as failure:
        ending = failure
    unpacked.seek(0)
    return unpacked, ending


class _Headers(io.RawIOBase):
    """A tar file for tarfile's header reads; bounds the lengths that headers claim, which tarfile trusts."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.member_bytes = 0  # read so far from the current member's headers

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        self.member_bytes += size
        if size < 0 or self.member_bytes > _HEADER_BYTES:
            raise tarfile.ReadError("a header is too long")
        data = self._file.read(size)
        if _ENDLESS_NUMBER.search(data):  # tarfile would parse it in quadratic time
            raise tarfile.ReadError("a header contains an endless number")
        return data


class _Slice(io.RawIOBase):
    """A stretch of a file."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        super().__init__()
        self._file, self._offset, self._left = file, offset, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read the next bytes. Raises EOFError if the file ends before the stretch does."""
        self._file.seek(self._offset)
        data = self._file.read(min(len(buffer), self._left))
        if not data and self._left and len(buffer):
            raise EOFError("the archive is truncated")
        buffer[: len(data)] = data
        self._offset += len(data)
        self._left -= len(data)
        return len(data)


def _slice(file: IO[bytes], offset: int, size: int) -> IO[bytes]:
    return io.BufferedReader(_Slice(file, offset, size))


MAX_DOCUMENTS = 100_000
MAX_DOCUMENT_BYTES = 4 * 2**30
_BROKEN = (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, LZMAError)
# zipfile and tarfile also raise these: for passwords, unknown methods, and impossible offsets and names.
_CLOSED = (*_BROKEN, RuntimeError, ValueError, LookupError, ArithmeticError, struct.error, AssertionError)


@dataclass(frozen=True)
class Found:
    """A candidate file. ``open`` gives its stored bytes; ``path`` is None inside archives."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]]
    path: Path | None = None


class Sources:
    """The files of ``source``; a context that keeps archives open. ``left_out`` notes what ``lenient`` skipped."""

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
        """List the regular files in natural order of their names.

        Raises TraceError if there are none, or if an archive is damaged or has members outside its folder.
        """
        source = self._source
        try:
            if source.is_dir():
                files = list(self._in_folder(source))
            elif source.name.lower().endswith(ENDINGS) and source.is_file():
                files = list(self._in_archive(source))
            elif source.is_file():
                files = [on_disk(source)]
            else:
                raise TraceError("nothing to import", got=source, expected="an existing file or folder")
        except OSError as failure:
            raise TraceError(f"{source} cannot be read", got=failure.strerror or failure) from None
        if not files:
            left_out = f" readable file; left out: {self.left_out[0]}" if self.left_out else " file"
            raise TraceError("nothing to import", got=f"{source} contains no{left_out}")
        return sorted(files, key=lambda file: _natural(file.name))

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
            for number, member in enumerate(members(path, self._stack)):
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
            what, got=got, fix="Create the archive again, or pass --lenient to skip this member."
        )
        if not self._lenient:
            raise refusal
        self.left_out.append(str(refusal))


def head_of(source: Found) -> bytes:
    """The first SNIFFED_BYTES unpacked bytes; fewer if the file is damaged.

    Raises TraceError if none can be read.
    """
    head = bytearray()
    with _opened(source) as file:
        try:
            for piece in pieces(file):
                head += piece
                if len(head) >= SNIFFED_BYTES:
                    break
        except _BROKEN:
            if not head:
                raise
    return _utf8(bytes(head[:SNIFFED_BYTES]))


def read_document(source: Found, *, lenient: bool = False) -> Document:
    """Read a complete file, decompressing gzip.

    Raises TraceError if it cannot be read or is implausibly large. Damage at its end is noted in the document,
    for readers to judge.
    """
    limit_bytes = min(MAX_DOCUMENT_BYTES, most_bytes(source.size_bytes))
    data = BytesIO()  # getvalue() does not copy
    ending = ""
    with _opened(source) as file:
        try:
            for piece in pieces(file):
                if data.tell() + len(piece) > limit_bytes:
                    raise TraceError(
                        f"{source.name} is too large when unpacked",
                        got=f"more than {limit_bytes} bytes from {source.size_bytes}",
                        fix=HOW_TO_RAISE_LIMIT,
                    )
                data.write(piece)
        except EOFError:
            ending = "the file is truncated"
        except _BROKEN as failure:
            ending = f"the file is damaged ({failure})"
    return Document(source.name, _utf8(data.getvalue()), ending, lenient)


def _utf8(data: bytes) -> bytes:
    """Convert text with a byte order mark to plain UTF-8; leave all other bytes alone."""
    if data.startswith(codecs.BOM_UTF8):
        return data[len(codecs.BOM_UTF8) :]
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace").encode()
    return data


@contextmanager
def _opened(source: Found) -> Iterator[IO[bytes]]:
    """Open a file; read errors inside the block become TraceErrors."""
    try:
        with source.open() as file:
            yield file
    except (*_CLOSED, OSError) as failure:
        if isinstance(failure, TraceError):
            raise
        reason = getattr(failure, "strerror", None) or str(failure) or "a truncated file"
        raise TraceError(f"{source.name} cannot be read", got=reason) from None


def on_disk(path: Path) -> Found:
    """A file outside archives. Raises OSError if it does not exist."""
    return Found(shown(path), path.stat().st_size, lambda: path.open("rb"), path)


def shown(name: object) -> str:
    """A printable file name, with undecodable bytes escaped."""
    return str(name).encode(errors="backslashreplace").decode()


def _check_count(number: int, where: Path) -> None:
    if number >= MAX_DOCUMENTS:
        raise TraceError(
            f"{where} contains too many files",
            got=f"more than {MAX_DOCUMENTS}",
            expected=f"at most {MAX_DOCUMENTS}",
        )


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key that puts rank 10 after rank 9."""
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
