"""A Chakra file's frames: messages, each after its length as a varint; and how such a file is told from others."""

from __future__ import annotations

from collections.abc import Iterator

MAX_VARINT_BYTES = 10

_METADATA_TAGS = frozenset([0x0A, 0x12])  # version, attr
_NODE_TAGS = frozenset(
    [0x08, 0x12, 0x18, 0x20, 0x22, 0x28, 0x2A, 0x30, 0x38, 0x42, 0x4A, 0x52]
)  # a field's number and how it is written


def frames(data: bytes, wrong: list[str]) -> Iterator[bytes]:
    """The messages of a file. Says in ``wrong`` where they end too early."""
    position = 0
    while position < len(data):
        length, after = _varint(data, position)
        left = len(data) - after
        if length < 1 or length > left:
            wrong.append(
                f"a message of {length if length >= 0 else 'endless'} bytes at byte {position}, with {left} left"
            )
            return
        yield data[after : after + length]
        position = after + length


def looks_like_chakra(head: bytes) -> bool:
    """Whether a file's first bytes are a metadata message and, as far as there is one, a node."""
    length, after = _varint(head, 0)
    if not 0 < length <= len(head) - after or not _is_made_of(head[after : after + length], _METADATA_TAGS):
        return False
    start = after + length
    length, after = _varint(head, start)
    node = head[after : after + max(length, 0)]
    return start == len(head) or (
        length > 0 and _is_made_of(node, _NODE_TAGS, cut=after + length > len(head))
    )


def _is_made_of(message: bytes, tags: frozenset[int], *, cut: bool = False) -> bool:
    """Whether a message consists of such fields and nothing else; ``cut`` where its end may be missing."""
    position = 0
    while position < len(message):
        tag = message[position]
        if tag not in tags:
            return False
        value, position = _varint(message, position + 1)
        if value < 0:
            return cut
        if tag & 7 == 2:  # as many bytes follow
            position += value
    return position == len(message) or cut


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The varint at ``position`` and where it ends; -1 where it has no end."""
    value = 0
    for count, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return -1, len(data)
