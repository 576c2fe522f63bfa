"""Files that other tools wrote: opened, unpacked and bounded."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from headway.errors import TraceError

MAX_DOCUMENT_BYTES = 8 * 2**30
MAX_RATIO = 400  # of what a compressed file may unpack to: traces come to 10 to 40
SMALL_BYTES = 64 * 2**20  # what any file may unpack to, whatever its ratio
_PIECE_BYTES = 16 * 2**20
_GZIP = b"\x1f\x8b"


def read_document(path: Path) -> tuple[bytes, str]:
    """The bytes of ``path``, unpacked where it is gzip, and what is wrong with their end, if something is.

    Raises TraceError where the file cannot be read, or unpacks to more than a trace does.
    """
    try:
        packed_bytes = path.stat().st_size
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
        if not packed:
            _check_size(path, packed_bytes)
            return path.read_bytes(), ""
        return _unpacked(path, max(SMALL_BYTES, MAX_RATIO * packed_bytes))
    except OSError as failure:
        raise TraceError(f"{path} cannot be read", got=failure.strerror or failure) from None


def _unpacked(path: Path, limit_bytes: int) -> tuple[bytes, str]:
    pieces: list[bytes] = []
    total_bytes = 0
    try:
        with gzip.open(path) as file:
            while piece := file.read(_PIECE_BYTES):
                total_bytes += len(piece)
                if total_bytes > limit_bytes:
                    raise TraceError(
                        f"{path} unpacks to far more than its size",
                        got=f"more than {limit_bytes} bytes",
                        expected=f"at most {MAX_RATIO} times its size",
                    )
                _check_size(path, total_bytes)
                pieces.append(piece)
    except EOFError:
        return b"".join(pieces), "the compressed file is truncated"
    except (zlib.error, gzip.BadGzipFile) as failure:
        return b"".join(pieces), f"the compressed file is damaged ({failure})"
    return b"".join(pieces), ""


def _check_size(path: Path, size_bytes: int) -> None:
    if size_bytes > MAX_DOCUMENT_BYTES:
        raise TraceError(
            f"{path} is too large", got=f"{size_bytes} bytes", expected=f"at most {MAX_DOCUMENT_BYTES}"
        )
