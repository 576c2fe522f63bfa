"""Reads PyTorch execution traces (torch.profiler.ExecutionTraceObserver): the order of operations, without times.

They contain the peers and sizes of communication that Kineto traces of Gloo lack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.arrays import Ints, Texts
from headway.interop.readers.foreign import MAX_EVENTS, Companion, Document, Reading, damaged
from headway.interop.readers.ranks import rank_in_name
from headway.interop.readers.torch_json import (
    COLLECTIVES,
    MESSAGES,
    UNREADABLE,
    bounded_int,
    ints,
    item_bytes,
    member,
    plain_name,
    ranks_of,
    salvaged,
)
from headway.trace.events import texts
from headway.trace.format import MAX_WORLD_SIZE

_ANNOTATION = re.compile(r"^(?:gloo|nccl|mpi|ucc|xccl):_?(\w+)")
_MAX_NESTING = 4  # lists of lists of tensors are as deep as calls go
_CALL, _RECORD, _GROUPS = "c10d::", "record_param_comms", "## process_group:init ##"


@dataclass(frozen=True, slots=True, eq=False)
class ExecutedCommunication:
    """One rank's communication as columns: one row per operation, in call order.

    ``call`` and ``annotation`` are record-function ids (Kineto's "Record function id") of the ``c10d::`` call and of
    the backend's annotation ("gloo:all_reduce"). ``size_bytes`` is the whole tensor's. "" and -1 mean unknown.
    """

    call: Ints
    annotation: Ints
    name: Texts  # as torch.distributed calls it
    group: Texts  # unknown for Gloo
    sequence: Ints  # its index in its group; messages are counted separately
    size_bytes: Ints
    peer: Ints  # a message's other end: its rank if the group's ranks are known, else its index in the group
    groups: dict[str, tuple[int, ...]]  # process groups' ranks, if known
    descriptions: dict[str, str]  # process groups' descriptions
    dropped: int = 0  # nodes that could not be read
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.call)


class Node(msgspec.Struct, frozen=True, gc=False):
    """One node. ``parent`` is the node that called it."""

    name: Any = None
    id: Any = None
    parent: Any = msgspec.field(name="ctrl_deps", default=None)
    inputs: msgspec.Raw = msgspec.Raw(b"null")
    attrs: msgspec.Raw = msgspec.Raw(b"null")


def is_communication(name: str) -> bool:
    """Whether nodes of this name belong to communication."""
    return name.startswith((_CALL, _RECORD, _GROUPS)) or bool(_ANNOTATION.match(name))


def _decoded(text: msgspec.Raw | str) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None


def attributes_of(node: Node) -> dict[str, Any]:
    """A node's attributes by name; empty if unreadable."""
    stated = _decoded(node.attrs)
    if not isinstance(stated, list):
        return {}
    return {
        attribute["name"]: attribute.get("value")
        for attribute in stated
        if isinstance(attribute, dict) and isinstance(attribute.get("name"), str)
    }


def _values(node: Node) -> list[Any]:
    stated = _decoded(node.inputs)
    values = stated.get("values") if isinstance(stated, dict) else None
    return values if isinstance(values, list) else []


def in_order_of_call(node: Node) -> tuple[int, int]:
    """Sort key for call order, by record-function id: files list nodes in the order in which they ended."""
    return bounded_int(attributes_of(node).get("rf_id")), bounded_int(node.id)


@dataclass
class _Row:
    """One operation while its nodes are collected."""

    node: int
    name: str
    call: int = -1
    annotation: int = -1
    group: str = ""
    sequence: int = -1
    size_bytes: int = -1
    other_end: int = -1
    described: bool = False


@dataclass
class OperationCollector:
    """Collects operations from their nodes, taken in call order.

    NCCL: ``c10d::allreduce_`` calls ``record_param_comms`` calls ``nccl:all_reduce``. Gloo: ``c10d::allreduce_``, then
    ``gloo:all_reduce``, whose name may differ: a reduce_scatter is annotated as an all_reduce.
    """

    rows: list[_Row] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)

    def take(self, node: Node) -> None:
        """Add the next node."""
        attributes = attributes_of(node)
        if node.name.startswith(_GROUPS):
            self._take_groups(_values(node))
            return
        rf_id, number = bounded_int(attributes.get("rf_id")), bounded_int(node.id)
        if node.name.startswith(_CALL):
            name = plain_name(node.name.removeprefix(_CALL))
            if name in COLLECTIVES or name in MESSAGES:
                self.rows.append(_of_call(_Row(number, name, call=rf_id), _values(node)))
        elif node.name == _RECORD:
            self._describe(node, rf_id, number, attributes)
        elif self.rows and self.rows[-1].annotation < 0:
            self.rows[-1].annotation = rf_id

    def _describe(self, node: Node, rf_id: int, number: int, attributes: Mapping[str, Any]) -> None:
        row = _of_record(_Row(number, "", call=rf_id, described=True), _values(node), attributes)
        if row.name not in COLLECTIVES and row.name not in MESSAGES:
            return  # such as "wait"
        last = self.rows[-1] if self.rows else None
        if last is None or last.described or node.parent != last.node:
            self.rows.append(row)
            return
        row.call, row.annotation = last.call, last.annotation
        row.node = last.node
        row.size_bytes = max(row.size_bytes, last.size_bytes)
        self.rows[-1] = row

    def _take_groups(self, values: Sequence[Any]) -> None:
        stated = _decoded(values[0]) if values and isinstance(values[0], str) else None
        for group in stated if isinstance(stated, list) else []:
            name = group.get("pg_name") if isinstance(group, dict) else None
            if isinstance(name, str):
                ranks = ranks_of(group.get("ranks"), group.get("group_size"))
                if ranks:
                    self.groups[name] = ranks
                words = group.get("pg_desc")
                self.descriptions[name] = words if isinstance(words, str) else ""

    def columns(self, dropped: int, notes: tuple[str, ...]) -> ExecutedCommunication:
        """The collected operations as columns."""
        rows = self.rows
        return ExecutedCommunication(
            call=ints([row.call for row in rows]),
            annotation=ints([row.annotation for row in rows]),
            name=texts([row.name for row in rows]),
            group=texts([row.group for row in rows]),
            sequence=ints([row.sequence for row in rows]),
            size_bytes=ints([row.size_bytes for row in rows]),
            peer=ints([member(self.groups.get(row.group, ()), row.other_end) for row in rows]),
            groups=self.groups,
            descriptions=self.descriptions,
            dropped=dropped,
            notes=notes,
        )


def _of_call(row: _Row, values: Sequence[Any]) -> _Row:
    """Fill in the size and peer from the arguments of a ``c10d::`` call."""
    sizes = [_tensors_bytes(value) for value in values]
    stated = [size for size in sizes if size > 0]
    row.size_bytes = 0 if row.name == "barrier" else max(stated, default=-1)
    if row.name in ("gather", "scatter") and len(stated) < 2:
        row.size_bytes = -1  # only the root has the whole
    if row.name in MESSAGES and len(values) >= 4:
        row.other_end = bounded_int(values[2], MAX_WORLD_SIZE)
    return row


def _of_record(row: _Row, values: Sequence[Any], attributes: Mapping[str, Any]) -> _Row:
    """Fill in the fields from ``record_param_comms``: named attributes since 2024, positional arguments before."""
    at = next(
        (index for index, value in enumerate(values) if isinstance(value, str) and not value.startswith("<")),
        -1,
    )
    if at < 0:
        return row
    stated = attributes.get("collective_name")
    row.name = plain_name(stated if isinstance(stated, str) else values[at])
    pair = next(
        (v for v in values[:at] if isinstance(v, list) and len(v) == 2 and isinstance(v[0], str)), [""]
    )
    named = attributes.get("pg_name")
    row.group = named if isinstance(named, str) else pair[0]
    row.sequence = _sequence(values[:at])
    if row.name in MESSAGES:
        row.other_end = bounded_int(values[at - 1], MAX_WORLD_SIZE) if at else -1
    elements = max(bounded_int(attributes.get(key), 2**56) for key in ("in_msg_nelems", "out_msg_nelems"))
    element_bytes = item_bytes(attributes.get("dtype"))
    if row.name == "barrier":
        row.size_bytes = 0
    elif elements > 0 and element_bytes > 0:
        row.size_bytes = elements * element_bytes
    return row


def _sequence(before: Sequence[Any]) -> int:
    """The sequence number: an integer, or since 2024 a pair with a message flag; a tensor may precede it."""
    for value in before[:2]:
        number = (
            value[0] if isinstance(value, list) and len(value) == 2 and isinstance(value[1], bool) else value
        )
        sequence = bounded_int(number)
        if sequence >= 0:
            return sequence
    return -1


def _tensors_bytes(value: Any, depth: int = 0) -> int:
    """The size of a tensor, or of (nested) lists of tensors; -1 for anything else.

    A tensor is written as id, storage id, offset, number of elements, element size, device.
    """
    if not isinstance(value, list) or not value or depth > _MAX_NESTING:
        return -1
    if len(value) == 6 and isinstance(value[5], str):
        count, element_bytes = bounded_int(value[3], 2**56), bounded_int(value[4], 64)
        return -1 if count < 0 or element_bytes < 0 else count * element_bytes
    parts = [_tensors_bytes(part, depth + 1) for part in value]
    return -1 if min(parts) < 0 else min(sum(parts), 2**62)


LACKS = "An execution trace has no times: import it together with the Kineto trace of the same rank and run."

_SCHEMA = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+-chakra')
_ITEM = re.compile(r'\{\s*"(?:id|name)"\s*:')


class _Document(msgspec.Struct, frozen=True):
    nodes: list[Node]


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is an execution trace, judged by its schema."""
    return head.lstrip()[:1] == b"{" and bool(_SCHEMA.search(head))


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read the communication in a rank's execution trace. Raises TraceError if it is damaged."""
    nodes, dropped = _nodes(document)
    gathered = OperationCollector()
    for node in sorted(nodes, key=in_order_of_call):
        gathered.take(node)
    notes = []
    if dropped:
        notes.append(f"{document.name} is damaged: {dropped} nodes could not be read.")
    if document.ending:
        notes.append(f"{document.name}: {document.ending}")
    content = gathered.columns(dropped, tuple(notes))
    rank = rank_in_name(document.name)
    return Reading(companions=[Companion(document.name, "execution_trace", rank, content)])


def _nodes(document: Document) -> tuple[list[Node], int]:
    """The communication nodes; and the number of unreadable nodes."""
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        nodes = msgspec.json.decode(document.data, type=_Document).nodes
        dropped = 0
    except UNREADABLE as failure:
        if not document.lenient:
            raise damaged(document, failure, expected="a complete execution trace") from None
        nodes, dropped = salvaged(document.data, b'"nodes"', _ITEM, _node_of)
    if len(nodes) > MAX_EVENTS:
        raise damaged(document, f"{len(nodes)} nodes", expected=f"at most {MAX_EVENTS}")
    named = [node for node in nodes if isinstance(node.name, str)]
    if len(named) < len(nodes) and not document.lenient:
        raise damaged(document, "a node without a name")
    wanted = [node for node in named if is_communication(node.name)]
    broken = [node for node in wanted if bounded_int(node.id) < 0 or not attributes_of(node)]
    if broken and not document.lenient:
        raise damaged(document, f"{broken[0].name} (id {broken[0].id!r:.40}) without an id and attributes")
    unreadable = set(map(id, broken))
    kept = [node for node in wanted if id(node) not in unreadable]
    return kept, dropped + len(nodes) - len(named) + len(broken)


def _node_of(value: Any) -> Node | None:
    if not isinstance(value, dict) or "name" not in value or "id" not in value:
        return None
    encoded = {key: msgspec.Raw(msgspec.json.encode(value.get(key))) for key in ("inputs", "attrs")}
    return msgspec.convert({**value, **encoded}, Node)
