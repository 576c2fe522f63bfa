"""Ways in which protobuf messages come to harm, field by field: lengths still hold, so that readers get to see it."""

from __future__ import annotations

import random

ODD_NUMBERS = (0, 1, 2, 127, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
DEEPEST = 12
Field = tuple[int, bytes | int]  # the tag; a number, or the bytes of what has a length or is fixed


def harmed_message(draw: random.Random, data: bytes) -> bytes:
    """A message with one to four of its fields, at any depth, changed."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = _harmed(draw, data, 0)
    return data


def harmed_frames(draw: random.Random, data: bytes) -> bytes:
    """A stream of messages, each after its length, with some messages changed, moved or lost."""
    frames = []
    position = 0
    while position < len(data):
        length, position = _number(data, position)
        frames.append(data[position : position + length])
        position += length
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(frames))
        harm = draw.choice(["change", "change", "change", "lose", "repeat", "swap"])
        if harm == "change":
            frames[at] = harmed_message(draw, frames[at])
        elif harm == "lose" and len(frames) > 1:
            del frames[at]
        elif harm == "repeat":
            frames.insert(draw.randrange(len(frames)), frames[at])
        else:
            other = draw.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
    return b"".join(_written(len(frame)) + frame for frame in frames)


def _harmed(draw: random.Random, data: bytes, depth: int) -> bytes:
    fields = _fields(data)
    if not fields:
        return bytes(draw.randbytes(draw.randrange(1, 20)))
    at = draw.randrange(len(fields))
    tag, value = fields[at]
    inner = _fields(value) if isinstance(value, bytes) and tag & 7 == 2 else None
    if inner and depth < DEEPEST and draw.random() < 0.85:
        assert isinstance(value, bytes)
        fields[at] = (tag, _harmed(draw, value, depth + 1))
        return _message(fields)
    harm = draw.choice(["value", "value", "value", "lose", "repeat", "tag", "swap"])
    if harm == "value":
        fields[at] = (tag, _other(draw, value))
    elif harm == "lose":
        del fields[at]
    elif harm == "repeat":
        fields += [fields[at]] * draw.choice((1, 2, 30))
    elif harm == "tag":
        fields[at] = ((draw.randrange(1, 30) << 3) | (tag & 7), value)
    else:
        other = draw.randrange(len(fields))
        fields[at], fields[other] = fields[other], fields[at]
    return _message(fields)


def _other(draw: random.Random, value: bytes | int) -> bytes | int:
    if isinstance(value, int):
        return draw.choice(
            (*ODD_NUMBERS, value + 1, max(value - 1, 0), value * 1000 % 2**64, draw.randrange(2**64))
        )
    return draw.choice(
        (
            b"",
            value[: len(value) // 2],
            value * 2,
            b"\x00\x1b[31m<b>",
            b"\xff" * len(value),
            b"9" * 400,
            draw.randbytes(8),
        )
    )


def _fields(data: bytes) -> list[Field] | None:
    """The fields of a message, or None where that is none."""
    fields: list[Field] = []
    position = 0
    try:
        while position < len(data):
            tag, position = _number(data, position)
            kind = tag & 7
            if tag >> 3 == 0 or kind in (3, 4, 6, 7):
                return None
            if kind == 0:
                value, position = _number(data, position)
                fields.append((tag, value))
                continue
            length = {1: 8, 5: 4}.get(kind, 0)
            if kind == 2:
                length, position = _number(data, position)
            if position + length > len(data):
                return None
            fields.append((tag, data[position : position + length]))
            position += length
    except IndexError:
        return None
    return fields


def _message(fields: list[Field]) -> bytes:
    parts = []
    for tag, value in fields:
        parts.append(_written(tag))
        if isinstance(value, int):
            parts.append(_written(value))
        elif tag & 7 == 2:
            parts += [_written(len(value)), value]
        else:
            parts.append(value[:8].ljust({1: 8, 5: 4}[tag & 7], b"\0")[: {1: 8, 5: 4}[tag & 7]])
    return b"".join(parts)


def _number(data: bytes, position: int) -> tuple[int, int]:
    """A varint, and where it ends. Raises IndexError where it does not."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise IndexError


def _written(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
