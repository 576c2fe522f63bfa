"""The bytes of files piece by piece, unpacked from gzip: all that comes before damage, no more than is asked for."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from typing import IO, cast

from headway.units import parse_size_bytes

MAX_RATIO = 100  # of what a compressed file may unpack to: traces come to 10 to 40
SMALL_BYTES = 64 * 2**20  # what any file may unpack to, whatever its ratio
USUAL_LIMIT_BYTES = 2 * 2**30  # what one file may unpack to, unless the variable says otherwise
LIMIT_VARIABLE = "HEADWAY_MAX_UNPACKED"
TO_RAISE_IT = f"If the file is what it should be, set {LIMIT_VARIABLE}, for example to 8GiB."
MOST_STREAMS = 100_000  # in one file, one after the other: some tools write one for each 64 kB
_PACKED_BYTES = 16_384
_PIECE_BYTES = 2**20
_GZIP = b"\x1f\x8b"


def most_bytes(stored_bytes: int, files: int = 1) -> int:
    """How much ``files`` of ``stored_bytes`` in all may unpack to: what ``LIMIT_VARIABLE`` says of one, if it is set.

    Raises UnitError where that cannot be read.
    """
    stated = os.environ.get(LIMIT_VARIABLE)
    if stated:
        limit_bytes = files * parse_size_bytes(stated, LIMIT_VARIABLE)
    else:
        limit_bytes = min(MAX_RATIO * stored_bytes, files * USUAL_LIMIT_BYTES)
    return max(SMALL_BYTES, stored_bytes, limit_bytes)


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """The bytes of ``file``, unpacked where it is gzip.

    Raises EOFError where it is truncated and zlib.error where it is damaged, after the last piece that can be read.
    """
    first = file.read(len(_GZIP))
    if first == _GZIP:
        yield from _unpacked(first, file)
    elif first:
        yield first
        # A member of a zip that ends in an error loses the piece that it comes with.
        yield from _stored(file, _PIECE_BYTES if isinstance(file, io.BufferedReader) else _PACKED_BYTES)


def _stored(file: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    # ``read`` goes on until it has as much as it was asked for, and loses that where there is an error.
    read = cast(io.BufferedReader, file).read1
    while piece := read(piece_bytes):
        yield piece


def _unpacked(first: bytes, file: IO[bytes]) -> Iterator[bytes]:
    """What gzip streams hold, one after the other, with nothing or zeros between them."""
    decoder = zlib.decompressobj(31)
    packed, streams = first, 1
    stored = _stored(file, _PACKED_BYTES)
    while packed:
        if decoder.eof:
            decoder, streams = zlib.decompressobj(31), streams + 1
            if streams > MOST_STREAMS:
                raise zlib.error(f"more than {MOST_STREAMS} compressed streams")
        before = decoder.copy()
        try:
            piece = decoder.decompress(packed, _PIECE_BYTES)
        except zlib.error:
            yield from _until_damage(before, packed)
            raise
        if piece:
            yield piece
        packed = decoder.unconsumed_tail or decoder.unused_data.lstrip(b"\0")
        while not packed:  # the next that is not padding after the end of a stream
            packed = next(stored, b"")
            if not packed:
                break
            packed = packed.lstrip(b"\0") if decoder.eof else packed
    if not decoder.eof:
        raise EOFError


def _until_damage(decoder: zlib._Decompress, packed: bytes) -> Iterator[bytes]:
    """What a decoder makes of the bytes before the one at which it fails."""
    try:
        for position in range(len(packed)):
            yield decoder.decompress(packed[position : position + 1])
    except zlib.error:
        return
