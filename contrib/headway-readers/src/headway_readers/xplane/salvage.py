"""What can be kept of a damaged XSpace: every message of it that can be read by itself."""

from __future__ import annotations

from collections.abc import Iterator

from headway_readers.xplane.messages import space_class, submessages

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def salvaged(data: bytes) -> tuple[bytes, int]:
    """An XSpace that can be read, of what ``data`` has of one; and how many parts of it were left out."""
    return _kept(memoryview(data), "Space")


def _kept(data: memoryview, message: str) -> tuple[bytes, int]:
    """``data`` without what cannot be read as ``message``: parts that hold others are mended, the rest is left out."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    inside = submessages(message)
    pieces: list[bytes] = []
    dropped = 0
    for number, key, body, whole in _fields(data):
        part = inside.get(number)
        packed = bytes(body)
        if part is not None:
            try:
                if not whole:
                    raise DecodeError
                space_class(part).FromString(packed)
            except DecodeError:
                packed, lost = _kept(body, part)
                dropped += max(lost, 1)
        elif not whole:
            dropped += 1
            continue
        pieces.append(key + (_varint(len(packed)) if key[0] & 7 == _LENGTH else b"") + packed)
    mended = b"".join(pieces)
    try:
        space_class(message).FromString(mended)
    except DecodeError:
        return b"", dropped + 1
    return mended, dropped


def _fields(data: memoryview) -> Iterator[tuple[int, bytes, memoryview, bool]]:
    """The fields of a message: number, key, content, and whether all of it is there. Ends where nothing can be read."""
    at, end = 0, len(data)
    while at < end:
        begin = at
        key, at = _read_varint(data, at)
        if key is None or key >> 3 == 0:
            return
        packed_key = bytes(data[begin:at])
        kind = key & 7
        if kind == _VARINT:
            value, after = _read_varint(data, at)
            if value is None:
                return
        elif kind == _LENGTH:
            length, at = _read_varint(data, at)
            if length is None:
                return
            after = at + length
        elif kind in (_FIXED64, _FIXED32):
            after = at + (8 if kind == _FIXED64 else 4)
        else:
            return
        if after > end and kind != _LENGTH:
            return
        yield key >> 3, packed_key, data[at : min(after, end)], after <= end
        at = after


def _read_varint(data: memoryview, at: int) -> tuple[int | None, int]:
    value = 0
    for place in range(10):
        if at >= len(data):
            return None, at
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at
    return None, at


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value >= 0x80:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)
