"""Extracts the communication of a Chakra trace, and the kinds of its computation.

Chakra knows communication by the names of NCCL kernels; Gloo's is written as host computation. So Gloo's operations
and the process groups are read from what "chakra_converter PyTorch" keeps of the execution trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.interop.readers.chakra.document import Nodes
from headway.interop.readers.chakra.schema import COLLECTIVES, NodeType
from headway.interop.readers.execution_trace import (
    ExecutedCommunication,
    Node,
    OperationCollector,
    in_order_of_call,
)
from headway.interop.readers.torch_json import UNREADABLE, ints, plain_name
from headway.trace.events import Kind, texts

_GROUPS = "## process_group:init ##"
ANNOTATED = "gloo:"
_WORDS = (("'", '"'), ("True", "true"), ("False", "false"), ("None", "null"))  # from Python's words to JSON's


def host_calls(nodes: Nodes) -> ExecutedCommunication:
    """Gloo's operations and the process groups, in the form of an execution trace."""
    gathered = OperationCollector()
    kept = [
        Node(
            name=str(nodes.name[index]),
            id=index,
            inputs=_raw({"values": _values(str(nodes.name[index]), words)}),
            attrs=_raw([{"name": "rf_id", "value": int(nodes.integers["rf_id"][index])}]),
        )
        for index, words in nodes.inputs.items()
    ]
    for node in sorted(kept, key=in_order_of_call):
        gathered.take(node)
    return gathered.columns(0, ())


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _values(name: str, words: str) -> list[Any]:
    """The arguments of a call, which the converter writes as Python literals."""
    if name == _GROUPS:
        return [words[words.find("[{") : words.rfind("}]") + 2]]
    for old, new in _WORDS:
        words = words.replace(old, new)
    try:
        decoded = msgspec.json.decode(words)
    except UNREADABLE:
        return []
    return decoded if isinstance(decoded, list) else []


REST = "rest"  # computation outside all phases, in traces written by Headway
STATED = frozenset(
    [Kind.INPUT, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.UPDATE, Kind.PAUSE, Kind.IDLE, REST]
)

_WORD = r"(?:^|[^a-z]){}(?:[^a-z]|$)"
_BACKWARD = r"^autograd::engine::evaluate_function|backward\d*$|" + _WORD.format("(?:bwd|backward)")
_PATTERNS = (
    (Kind.BACKWARD, re.compile(_BACKWARD, re.I)),
    (Kind.OPTIMIZER, re.compile(_WORD.format("(?:optimizer|optim|opt|sgd|adamw?|lamb)"), re.I)),
    (Kind.INPUT, re.compile(r"^enumerate\(DataLoader\)|" + _WORD.format("(?:dataloader|data_?load)"), re.I)),
    (Kind.FORWARD, re.compile(_WORD.format("(?:fwd|forward)"), re.I)),
)  # fmt: skip
_LAYER = re.compile(r"^COMP_NODE_(.+)_(?:FWD|BWD_WG|BWD_IG)$")  # as "chakra_converter Text" names nodes


def of_name(name: str) -> str:
    """The kind that a node's name implies, or ""."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "")


def shown(name: str, kind: str) -> str:
    """The display name of a node: its layer, if the name consists of layer and phase."""
    match = _LAYER.match(name)
    return match[1] if match else unprefixed(name, f"COMP_NODE_{kind}")


def unprefixed(name: str, prefix: str) -> str:
    """``name`` without the prefix that Chakra's tools expect."""
    return name.removeprefix(prefix).removeprefix("_") if name.startswith(prefix) else name


def of_nodes(nodes: Nodes) -> list[str]:
    """The kind of each node, its own or its closest caller's; "" if none implies one."""
    names = nodes.name.tolist()
    kind_of_name = {name: of_name(name) for name in set(names)}
    kinds: list[str | None] = [
        stated if stated in STATED else kind_of_name[name] or None
        for stated, name in zip(nodes.text["headway_kind"].tolist(), names, strict=True)
    ]
    for node in range(len(nodes)):
        path = []
        at: int | None = node
        while at is not None and kinds[at] is None:
            kinds[at] = ""  # provisional, so that cycles of callers end
            path.append(at)
            at = nodes.ctrl_deps[at][0] if nodes.ctrl_deps[at] else None
        kind = kinds[at] if at is not None else ""
        for ancestor in path:
            kinds[ancestor] = kind
    return [kind or "" for kind in kinds]


_KINDS = {NodeType.SEND: Kind.SEND, NodeType.RECEIVE: Kind.RECEIVE, NodeType.COLLECTIVE: Kind.COLLECTIVE}
_SHARES = ("all_gather", "gather")  # their comm_size is each rank's input


@dataclass(frozen=True, slots=True, eq=False)
class Communication:
    """Communication as columns: one row per operation; ``index`` is its node. -1 and "" mean unknown."""

    index: npt.NDArray[np.intp]
    kind: Texts
    name: Texts
    group: Texts
    sequence: Ints
    size_bytes: Ints  # the whole tensor's
    peer: Ints
    bucket: Ints
    algorithm: Texts
    notes: tuple[str, ...]

    def queues(self) -> list[Hashable]:
        """The queue of each operation: one per group for collectives, one per group, direction and peer for messages."""
        return [
            (group,) if kind == Kind.COLLECTIVE else (group, kind, peer)
            for group, kind, peer in zip(
                self.group.tolist(), self.kind.tolist(), self.peer.tolist(), strict=True
            )
        ]


class _Row(NamedTuple):
    node: int
    kind: str
    name: str
    group: str = ""
    size_bytes: int = -1
    peer: int = -1


def communication_of(
    nodes: Nodes, called: ExecutedCommunication, members: Mapping[str, int], names: Mapping[str, str]
) -> Communication:
    """Collect communication nodes, Gloo's included; ``members`` has group sizes, ``names`` original group names."""
    announced = {number: row for row, number in enumerate(called.annotation.tolist()) if number >= 0}
    rows = []
    for index, (kind, name) in enumerate(zip(nodes.type.tolist(), nodes.name.tolist(), strict=True)):
        if kind in _KINDS and _is_operation(nodes, index):
            rows.append(_stated(nodes, index, _KINDS[kind], members))
        elif name.startswith(ANNOTATED):
            rows.append(_called(name, index, called, announced.get(int(nodes.integers["rf_id"][index]), -1)))
    picked = np.array([row.node for row in rows], dtype=np.intp)
    unknown = sum(row.name in _SHARES and row.size_bytes < 0 for row in rows)
    notes = (
        [f"{unknown} collectives have no total size: the size of their group is unknown."] if unknown else []
    )
    return Communication(
        index=picked,
        kind=texts([row.kind for row in rows]),
        name=texts([row.name for row in rows]),
        group=texts([names.get(row.group, row.group) for row in rows]),
        sequence=_sequences(rows, nodes),
        size_bytes=ints([row.size_bytes for row in rows]),
        peer=ints([row.peer for row in rows]),
        bucket=nodes.integers["headway_bucket"][picked],
        algorithm=nodes.text["headway_algorithm"][picked],
        notes=tuple(notes),
    )


def _is_operation(nodes: Nodes, index: int) -> bool:
    """Whether a communication node is an operation; older converters also write host calls so, without a type."""
    return not nodes.on_host[index] or nodes.integers["comm_type"][index] >= 0


def _stated(nodes: Nodes, index: int, kind: str, members: Mapping[str, int]) -> _Row:
    integers = {name: int(column[index]) for name, column in nodes.integers.items()}
    group = str(nodes.text["pg_name"][index])
    size_bytes = integers["comm_size"] if integers["comm_size"] >= 0 else integers["tensor_size"]
    if kind == Kind.SEND:
        return _Row(index, kind, "send", group, size_bytes, integers["comm_dst"])
    if kind == Kind.RECEIVE:
        return _Row(index, kind, "receive", group, size_bytes, integers["comm_src"])
    has_type = 0 <= integers["comm_type"] < len(COLLECTIVES)
    name = (
        COLLECTIVES[integers["comm_type"]]
        if has_type
        else unprefixed(str(nodes.name[index]), "COMM_COLL_NODE")
    )
    if name in _SHARES:
        ranks = members.get(group, 0)
        size_bytes = min(size_bytes * ranks, 2**62) if ranks > 0 and size_bytes >= 0 else -1
    exactly = integers["headway_size"]
    return _Row(index, kind, name, group, exactly if exactly >= 0 else size_bytes)


def _called(name: str, index: int, called: ExecutedCommunication, row: int) -> _Row:
    """A Gloo operation, described by its call: a reduce_scatter is annotated as an all_reduce."""
    plain = str(called.name[row]) if row >= 0 else plain_name(name.removeprefix(ANNOTATED))
    kind = {"send": Kind.SEND, "receive": Kind.RECEIVE}.get(plain, Kind.COLLECTIVE)
    if row < 0:
        return _Row(index, kind, plain)
    return _Row(index, kind, plain, "", int(called.size_bytes[row]), int(called.peer[row]))


def _sequences(rows: list[_Row], nodes: Nodes) -> Ints:
    """The stated sequence numbers; other collectives are counted within their group, ordered by node id."""
    sequences = nodes.integers["headway_sequence"][[row.node for row in rows]] if rows else ints([])
    counted: Counter[str] = Counter()
    for at in sorted(range(len(rows)), key=lambda at: nodes.id[rows[at].node]):
        if sequences[at] < 0 and rows[at].kind == Kind.COLLECTIVE:
            sequences[at] = counted[rows[at].group]
            counted[rows[at].group] += 1
    return sequences
