"""Decodes a Chakra file into columns of nodes and their dependencies.

A file holds one GlobalMetadata message and then Nodes, each preceded by its length as a varint. Field names and
numbers are those of MLCommons Chakra 1.0.0 (et_def.proto); unknown fields are skipped, so other versions from 0.0.4 on
can be read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Ints, Texts
from headway.errors import TraceError
from headway.interop.readers.chakra.schema import metadata_class, node_class
from headway.interop.readers.foreign import MAX_EVENTS, Document, damaged
from headway.interop.readers.torch_json import bounded_int, ints
from headway.trace.events import texts

MAX_VARINT_BYTES = 10

_METADATA_TAGS = frozenset([0x0A, 0x12])  # version, attr
_NODE_TAGS = frozenset(
    [0x08, 0x12, 0x18, 0x20, 0x22, 0x28, 0x2A, 0x30, 0x38, 0x42, 0x4A, 0x52]
)  # field number and wire type


def frames(data: bytes, wrong: list[str]) -> Iterator[bytes]:
    """Iterate over a file's messages; a truncated one is noted in ``wrong``."""
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
    """Whether a file begins with a metadata message, followed by a node if there is more."""
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
    """Whether a message consists of fields with these ``tags``; ``cut`` says that its end may be missing."""
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
    """Decode the varint at ``position``; returns its value (-1 if truncated) and its end."""
    value = 0
    for count, byte in enumerate(data[position : position + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return -1, len(data)


LONGEST_US = 2**61 // 1000  # so that ends fit into 64 bits of nanoseconds
INPUTS_OF = ("c10d::", "gloo:", "## process_group:init ##")  # nodes whose inputs are kept

_INTEGERS = (
    "stream", "tid", "rf_id", "comm_type", "comm_size", "tensor_size", "comm_src", "comm_dst",
    "headway_sequence", "headway_bucket", "headway_size", "headway_asked",
)  # fmt: skip
_TEXT = ("pg_name", "headway_kind", "headway_algorithm")
_WANTED = frozenset([*_INTEGERS, *_TEXT, "is_cpu_op"])


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """A file's nodes as columns, in file order; -1, "" and () mean not stated."""

    id: list[int]
    name: Texts
    type: Ints
    start_ns: Ints  # 0 if not stated
    duration_ns: Ints
    on_host: Flags  # is_cpu_op
    integers: dict[str, Ints]  # integer attributes
    text: dict[str, Texts]  # text attributes
    inputs: dict[int, str]  # the inputs of the nodes of INPUTS_OF
    data_deps: list[tuple[int, ...]]  # indices
    ctrl_deps: list[tuple[int, ...]]  # indices; in PyTorch traces a node's caller

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True, eq=False)
class ChakraDocument:
    """A decoded file: metadata attributes, nodes, and what was dropped."""

    attributes: dict[str, Any]
    nodes: Nodes
    dropped: int
    notes: tuple[str, ...]


class _Columns:
    """Nodes while they are read."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self.names: list[str] = []
        self.types: list[int] = []
        self.starts_us: list[int] = []
        self.durations_us: list[int] = []
        self.attributes: dict[str, tuple[list[int], list[Any]]] = {name: ([], []) for name in _WANTED}
        self.inputs: dict[int, str] = {}
        self.data_deps: list[tuple[int, ...]] = []
        self.ctrl_deps: list[tuple[int, ...]] = []

    def add(self, node: Any) -> str:
        """Add a node; returns what is wrong with it, or ""."""
        number, start_us, duration_us = node.id, node.start_time_micros, node.duration_micros
        if number in self.index:
            return f"the id {number} twice"
        if start_us > LONGEST_US or duration_us > LONGEST_US:
            return f"a node of {duration_us} us at {start_us} us"
        self.index[number] = len(self.names)
        name = node.name
        if name.startswith(INPUTS_OF):
            self.inputs[len(self.names)] = node.inputs.values
        self.names.append(name)
        self.types.append(node.type)
        self.starts_us.append(start_us)
        self.durations_us.append(duration_us)
        self.data_deps.append(tuple(node.data_deps))
        self.ctrl_deps.append(tuple(node.ctrl_deps))
        for attribute in node.attr:
            column = self.attributes.get(attribute.name)
            if column is not None:
                column[0].append(len(self.names) - 1)
                column[1].append(_value(attribute))
        return ""

    def column(self, name: str, otherwise: Any, convert: Callable[[Any], Any]) -> npt.NDArray[Any]:
        """One attribute of every node; the last value counts if it is repeated."""
        kind = object if isinstance(otherwise, str) else type(otherwise)
        values = np.full(len(self.names), otherwise, dtype=kind)
        at, stated = self.attributes[name]
        values[at] = [convert(value) for value in stated]
        return values


def parse(document: Document) -> ChakraDocument:
    """Decode a file. Raises TraceError if it is damaged, unless it is read leniently."""
    node_of, metadata_of = node_class().FromString, metadata_class().FromString
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    wrong: list[str] = [document.ending] if document.ending else []
    attributes: dict[str, Any] = {}
    columns = _Columns()
    dropped = 0
    for number, frame in enumerate(frames(document.data, wrong)):
        if number > MAX_EVENTS:
            raise damaged(document, f"more than {MAX_EVENTS} nodes", expected=f"at most {MAX_EVENTS}")
        try:
            if number == 0:
                attributes = _attributes(metadata_of(frame))
                continue
            failure = columns.add(node_of(frame))
        except DecodeError:
            failure = f"message {number} ({len(frame)} bytes) is not {'a node' if number else 'metadata'}"
        if failure:
            dropped += 1
            wrong.append(failure)
        if wrong and not document.lenient:
            break
    nodes = _nodes(columns, wrong)
    if wrong and not document.lenient:
        raise damaged(document, wrong[0], expected="a complete Chakra trace")
    if not len(nodes):
        raise _empty(document)
    notes = (
        [f"{document.name} is damaged ({_first(wrong)}): only its readable nodes were kept."] if wrong else []
    )
    return ChakraDocument(attributes, nodes, dropped, tuple(notes))


def _empty(document: Document) -> TraceError:
    return damaged(document, "no readable node", expected="a complete Chakra trace")


def _first(wrong: list[str]) -> str:
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _value(attribute: Any) -> Any:
    kind = attribute.WhichOneof("value")
    return getattr(attribute, kind) if kind else None


def _attributes(message: Any) -> dict[str, Any]:
    values = {attribute.name: _value(attribute) for attribute in message.attr}
    return {name: list(value.values) if hasattr(value, "values") else value for name, value in values.items()}


def _nodes(columns: _Columns, wrong: list[str]) -> Nodes:
    """Convert to arrays, with dependencies as indices instead of ids.

    A missing data dependency is damage. Missing callers, and nodes that are their own callers, are normal in files
    converted from PyTorch.
    """
    index = columns.index
    missing = next((dep for deps in columns.data_deps for dep in deps if dep not in index), None)
    if missing is not None:
        wrong.append(f"a dependency on node {missing}, which does not exist")
    return Nodes(
        id=list(index),
        name=texts(columns.names),
        type=ints(columns.types),
        start_ns=ints(columns.starts_us) * 1000,
        duration_ns=ints(columns.durations_us) * 1000,
        on_host=columns.column("is_cpu_op", False, bool),
        integers={name: columns.column(name, -1, bounded_int) for name in _INTEGERS},
        text={name: columns.column(name, "", _word) for name in _TEXT},
        inputs=columns.inputs,
        data_deps=[tuple(index[needed] for needed in deps if needed in index) for deps in columns.data_deps],
        ctrl_deps=[
            tuple(index[needed] for needed in deps if index.get(needed, node) != node)
            for node, deps in enumerate(columns.ctrl_deps)
        ],
    )
