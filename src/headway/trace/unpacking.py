"""The bytes of files piece by piece, unpacked from gzip: all that comes before damage, no more than is asked for."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import IO, cast

MAX_RATIO = 400  # of what a compressed file may unpack to: traces come to 10 to 40
SMALL_BYTES = 64 * 2**20  # what any file may unpack to, whatever its ratio
MOST_STREAMS = 100_000  # in one file, one after the other: some tools write one for each 64 kB
_PACKED_BYTES = 16_384
_PIECE_BYTES = 2**20
_GZIP = b"\x1f\x8b"


def most_bytes(stored_bytes: int) -> int:
    """How much a file of ``stored_bytes`` may unpack to."""
    return max(SMALL_BYTES, MAX_RATIO * stored_bytes)


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
