"""PyTorch execution traces: what ran and in which order, from torch.profiler.ExecutionTraceObserver.

They say of communication what a Kineto trace of Gloo leaves out: to whom, and how much. They have no times.
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
    ints,
    item_bytes,
    member,
    plain_name,
    ranks_of,
    salvaged,
    whole,
)
from headway.trace.events import texts
from headway.trace.format import MAX_WORLD_SIZE

_ANNOTATION = re.compile(r"^(?:gloo|nccl|mpi|ucc|xccl):_?(\w+)")
_MAX_NESTING = 4  # lists of lists of tensors are as deep as calls go
_CALL, _RECORD, _GROUPS = "c10d::", "record_param_comms", "## process_group:init ##"


@dataclass(frozen=True, slots=True, eq=False)
class ExecutedCommunication:
    """The communication of one rank as columns, one row an operation, in the order of their calls.

    ``call`` and ``annotation`` are record-function ids, as Kineto's "Record function id": of ``c10d::`` and of what the
    backend annotates ("gloo:all_reduce"). ``size_bytes`` is the whole tensor's. "" and -1 stand for what is not told.
    """

    call: Ints
    annotation: Ints
    name: Texts  # as torch.distributed calls it
    group: Texts  # Gloo's calls do not tell theirs
    sequence: Ints  # its index in its group; messages are counted separately
    size_bytes: Ints
    peer: Ints  # a message's other end: a rank where the group's ranks are known, else its place in the group
    groups: dict[str, tuple[int, ...]]  # process groups' ranks, where they are told
    descriptions: dict[str, str]  # process groups' own words for themselves
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


def speaks_of_communication(name: str) -> bool:
    """Whether nodes of this name have to do with communication."""
    return name.startswith((_CALL, _RECORD, _GROUPS)) or bool(_ANNOTATION.match(name))


def _decoded(text: msgspec.Raw | str) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None


def attributes_of(node: Node) -> dict[str, Any]:
    """A node's attributes by name; none where they cannot be read."""
    stated = _decoded(node.attrs)
    if not isinstance(stated, list):
        return {}
    return {
        one["name"]: one.get("value")
        for one in stated
        if isinstance(one, dict) and isinstance(one.get("name"), str)
    }


def _values(node: Node) -> list[Any]:
    stated = _decoded(node.inputs)
    found = stated.get("values") if isinstance(stated, dict) else None
    return found if isinstance(found, list) else []


def in_order_of_call(node: Node) -> tuple[int, int]:
    """Record-function ids count calls as they were made; nodes are written as they ended."""
    return whole(attributes_of(node).get("rf_id")), whole(node.id)


@dataclass
class _Row:
    """One operation while its nodes are gathered."""

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
class Gathered:
    """Operations, gathered from their nodes in the order of their calls.

    NCCL: ``c10d::allreduce_`` calls ``record_param_comms`` calls ``nccl:all_reduce``. Gloo: ``c10d::allreduce_``, then
    ``gloo:all_reduce``, which need not be of the same name: a reduce_scatter is announced as an all_reduce.
    """

    rows: list[_Row] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)

    def take(self, node: Node) -> None:
        """Take the next node."""
        attributes = attributes_of(node)
        if node.name.startswith(_GROUPS):
            self._take_groups(_values(node))
            return
        rf_id, number = whole(attributes.get("rf_id")), whole(node.id)
        if node.name.startswith(_CALL):
            name = plain_name(node.name.removeprefix(_CALL))
            if name in COLLECTIVES or name in MESSAGES:
                self.rows.append(_of_call(_Row(number, name, call=rf_id), _values(node)))
        elif node.name == _RECORD:
            self._describe(node, rf_id, number, attributes)
        elif self.rows and self.rows[-1].annotation < 0:
            self.rows[-1].annotation = rf_id

    def _describe(self, node: Node, rf_id: int, number: int, attributes: Mapping[str, Any]) -> None:
        said = _of_record(_Row(number, "", call=rf_id, described=True), _values(node), attributes)
        if said.name not in COLLECTIVES and said.name not in MESSAGES:
            return  # such as "wait"
        last = self.rows[-1] if self.rows else None
        if last is None or last.described or node.parent != last.node:
            self.rows.append(said)
            return
        said.call, said.annotation = last.call, last.annotation
        said.node = last.node
        said.size_bytes = max(said.size_bytes, last.size_bytes)
        self.rows[-1] = said

    def _take_groups(self, values: Sequence[Any]) -> None:
        stated = _decoded(values[0]) if values and isinstance(values[0], str) else None
        for one in stated if isinstance(stated, list) else []:
            name = one.get("pg_name") if isinstance(one, dict) else None
            if isinstance(name, str):
                ranks = ranks_of(one.get("ranks"), one.get("group_size"))
                if ranks:
                    self.groups[name] = ranks
                words = one.get("pg_desc")
                self.descriptions[name] = words if isinstance(words, str) else ""

    def columns(self, dropped: int, notes: tuple[str, ...]) -> ExecutedCommunication:
        """What was gathered, as columns."""
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
    """What a ``c10d::`` call says of itself: its tensors, and a message's other end after the group."""
    sizes = [_tensors_bytes(value) for value in values]
    stated = [size for size in sizes if size > 0]
    row.size_bytes = 0 if row.name == "barrier" else max(stated, default=-1)
    if row.name in ("gather", "scatter") and len(stated) < 2:
        row.size_bytes = -1  # only the root has the whole
    if row.name in MESSAGES and len(values) >= 4:
        row.other_end = whole(values[2], MAX_WORLD_SIZE)
    return row


def _of_record(row: _Row, values: Sequence[Any], attributes: Mapping[str, Any]) -> _Row:
    """What ``record_param_comms`` says: by its attributes, which have names since 2024, and by its arguments' order."""
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
        row.other_end = whole(values[at - 1], MAX_WORLD_SIZE) if at else -1
    elements = max(whole(attributes.get(key), 2**56) for key in ("in_msg_nelems", "out_msg_nelems"))
    each = item_bytes(attributes.get("dtype"))
    if row.name == "barrier":
        row.size_bytes = 0
    elif elements > 0 and each > 0:
        row.size_bytes = elements * each
    return row


def _sequence(before: Sequence[Any]) -> int:
    """The sequence number: an integer, since 2024 with whether it counts messages; tensors may stand before it."""
    for value in before[:2]:
        number = (
            value[0] if isinstance(value, list) and len(value) == 2 and isinstance(value[1], bool) else value
        )
        found = whole(number)
        if found >= 0:
            return found
    return -1


def _tensors_bytes(value: Any, depth: int = 0) -> int:
    """How much a tensor, or a list of tensors or of lists of them, holds; -1 for what is neither.

    A tensor is written as its id, its storage's id, an offset, its number of elements, the size of one, and its device.
    """
    if not isinstance(value, list) or not value or depth > _MAX_NESTING:
        return -1
    if len(value) == 6 and isinstance(value[5], str):
        count, each = whole(value[3], 2**56), whole(value[4], 64)
        return -1 if count < 0 or each < 0 else count * each
    parts = [_tensors_bytes(part, depth + 1) for part in value]
    return -1 if min(parts) < 0 else min(sum(parts), 2**62)


LACKS = "An execution trace says what ran, not when: import it together with the Kineto trace of the same rank and run."

_SCHEMA = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+-chakra')
_ITEM = re.compile(r'\{\s*"(?:id|name)"\s*:')


class _Document(msgspec.Struct, frozen=True):
    nodes: list[Node]


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is an execution trace: by its schema."""
    return head.lstrip()[:1] == b"{" and bool(_SCHEMA.search(head))


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read what a rank's execution trace says of its communication. Raises TraceError where it is damaged."""
    nodes, dropped = _nodes(document)
    gathered = Gathered()
    for node in sorted(nodes, key=in_order_of_call):
        gathered.take(node)
    notes = []
    if dropped:
        notes.append(f"{document.name} is damaged: {dropped} of its nodes could not be read.")
    if document.ending:
        notes.append(f"{document.name}: {document.ending}")
    content = gathered.columns(dropped, tuple(notes))
    rank = rank_in_name(document.name)
    return Reading(companions=[Companion(document.name, "execution_trace", rank, content)])


def _nodes(document: Document) -> tuple[list[Node], int]:
    """The nodes that have to do with communication; and how many of all nodes could not be read."""
    if document.ending and not document.lenient:
        raise damaged(document, document.ending)
    try:
        nodes = msgspec.json.decode(document.data, type=_Document).nodes
        dropped = 0
    except UNREADABLE as failure:
        if not document.lenient:
            raise damaged(document, failure, expected="a whole execution trace") from None
        nodes, dropped = salvaged(document.data, b'"nodes"', _ITEM, _node_of)
    if len(nodes) > MAX_EVENTS:
        raise damaged(document, f"{len(nodes)} nodes", expected=f"at most {MAX_EVENTS}")
    named = [node for node in nodes if isinstance(node.name, str)]
    if len(named) < len(nodes) and not document.lenient:
        raise damaged(document, "a node without a name")
    wanted = [node for node in named if speaks_of_communication(node.name)]
    broken = [node for node in wanted if whole(node.id) < 0 or not attributes_of(node)]
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
