"""Archives of documents, zip and tar. No member is trusted to be where it says, or what, or how large."""

from __future__ import annotations

import io
import re
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from headway.errors import TraceError
from headway.trace.rank_columns import TO_RAISE_IT, most_bytes, pieces

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
_HEADER_BYTES = 64 * 2**10  # of one member of a tar: long names and attributes take some hundred
_BLOCK_BYTES = 512
_ENDLESS_NUMBER = re.compile(rb"\d{64}")


@dataclass(frozen=True)
class Member:
    """A member. ``refused`` says why it is not to be read, if it is not; ``size_bytes`` is what is stored of it."""

    name: str
    size_bytes: int
    open: Callable[[], IO[bytes]]
    refused: str = ""


def members(path: Path, stack: ExitStack) -> Iterator[Member]:
    """The files in the archive ``path``, which stays open as long as ``stack``.

    Raises TraceError where it would unpack to far more than traces do, and what zipfile and tarfile raise of damage.
    """
    return _zipped(path, stack) if path.suffix.lower() == ".zip" else _tarred(path, stack)


def climbs_out(name: str) -> bool:
    """Whether an archive's member would lie outside of the archive's folder if it were unpacked."""
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
        refused = "would lie outside of it"
    elif not regular:
        refused = "is no plain file"
    return Member(name, size_bytes, opened, refused)


def _check_size(path: Path, stored_bytes: int, unpacked_bytes: int) -> None:
    if unpacked_bytes > most_bytes(stored_bytes):
        raise TraceError(
            f"{path} unpacks to far more than traces do",
            got=f"{unpacked_bytes} bytes from {stored_bytes}",
            expected=f"at most {most_bytes(stored_bytes)}",
            fix=TO_RAISE_IT,
        )


def _unpacked(path: Path, file: IO[bytes], stack: ExitStack) -> tuple[IO[bytes], Exception | None]:
    """A compressed tar, unpacked into a file without a name, and what is wrong with its end.

    Its members are read in the order of their names, which would unpack it from its beginning again and again.
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
    """What tarfile reads a tar's headers from; it would take any length that a header states for granted."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self.member_bytes = 0  # read of the member that is looked at

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        self.member_bytes += size
        if size < 0 or self.member_bytes > _HEADER_BYTES:
            raise tarfile.ReadError("a header is too long")
        data = self._file.read(size)
        if _ENDLESS_NUMBER.search(
            data
        ):  # it takes tarfile the square of its length to see that it is no length
            raise tarfile.ReadError("a header with an endless number")
        return data


class _Slice(io.RawIOBase):
    """A stretch of a file."""

    def __init__(self, file: IO[bytes], offset: int, size: int) -> None:
        super().__init__()
        self._file, self._offset, self._left = file, offset, size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read on. Raises EOFError where the file ends before the stretch does."""
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
