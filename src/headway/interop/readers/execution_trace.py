"""PyTorch execution traces: what ran and in which order, from torch.profiler.ExecutionTraceObserver.

They say of communication what a Kineto trace of Gloo leaves out: to whom, and how much. They have no times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.interop.readers.executed import (
    Gathered,
    Node,
    attributes_of,
    in_order_of_call,
    speaks_of_communication,
)
from headway.interop.readers.foreign import MAX_EVENTS, Companion, Document, Reading, damaged
from headway.interop.readers.ranks import rank_in_name
from headway.interop.readers.torch_json import UNREADABLE, salvaged, whole

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
