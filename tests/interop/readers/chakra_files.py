"""Chakra files taken apart and put together, with the schema alone."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.interop.readers.chakra.document import frames
from headway.interop.readers.chakra.schema import metadata_class, node_class

FIXTURES = Path(__file__).parent / "fixtures" / "chakra"


def fixture(name: str) -> bytes:
    """A fixture's bytes, unpacked."""
    data = (FIXTURES / name).read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


def taken_apart(data: bytes) -> tuple[Any, list[Any]]:
    """A file's metadata and nodes."""
    wrong: list[str] = []
    messages = list(frames(data, wrong))
    assert not wrong
    return metadata_class().FromString(messages[0]), [node_class().FromString(one) for one in messages[1:]]


def put_together(metadata: Any, nodes: Iterable[Any]) -> bytes:
    """A file of these messages."""
    made = b""
    for message in (metadata, *nodes):
        content = message.SerializeToString()
        made += varint(len(content)) + content
    return made


def varint(value: int) -> bytes:
    """``value`` as protobuf writes it."""
    more, last = value >> 7, value & 0x7F
    return bytes([last | 0x80]) + varint(more) if more else bytes([last])


def made(*nodes: Any, **attributes: object) -> bytes:
    """A file of these nodes, with text and integers about itself."""
    metadata = metadata_class()(version="1.0.0")
    for name, value in attributes.items():
        if isinstance(value, list):
            metadata.attr.add(name=name).int64_list.values.extend(value)
        else:
            _attribute(metadata, name, value)
    return put_together(metadata, nodes)


def node(number: int, kind: int, duration_us: int = 0, *, name: str = "", start_us: int = 0, needs: Iterable[int] = (),
         callers: Iterable[int] = (), **attributes: object) -> Any:  # fmt: skip
    """One node."""
    one = node_class()(
        id=number, name=name, type=kind, start_time_micros=start_us, duration_micros=duration_us
    )
    one.data_deps.extend(needs)
    one.ctrl_deps.extend(callers)
    for key, value in attributes.items():
        _attribute(one, key, value)
    return one


def _attribute(message: Any, name: str, value: object) -> None:
    field = {bool: "bool_val", int: "int64_val", str: "string_val", float: "double_val"}[type(value)]
    setattr(message.attr.add(name=name), field, value)
