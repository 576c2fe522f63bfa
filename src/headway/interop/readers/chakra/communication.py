"""The communication of a Chakra trace, as columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.arrays import Ints, Texts
from headway.interop.readers.chakra.document import Nodes
from headway.interop.readers.chakra.host_calls import ANNOTATED
from headway.interop.readers.chakra.phases import unprefixed
from headway.interop.readers.chakra.schema import COLLECTIVES, NodeType
from headway.interop.readers.executed import ExecutedCommunication
from headway.interop.readers.torch_json import ints, plain_name
from headway.trace.events import Kind, texts

_KINDS = {NodeType.SEND: Kind.SEND, NodeType.RECEIVE: Kind.RECEIVE, NodeType.COLLECTIVE: Kind.COLLECTIVE}
_SHARES = ("all_gather", "gather")  # of these a node's comm_size is what each rank gives


@dataclass(frozen=True, slots=True, eq=False)
class Communication:
    """One row an operation; ``index`` is its node. -1 and "" stand for what is not known."""

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
        """What each operation takes its turn in: collectives their group's queue, messages one an other end."""
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
    """Communication nodes, and Gloo's. ``members`` counts the ranks of groups; ``names`` gives groups other names."""
    announced = {number: row for row, number in enumerate(called.annotation.tolist()) if number >= 0}
    rows = []
    for index, (kind, name) in enumerate(zip(nodes.type.tolist(), nodes.name.tolist(), strict=True)):
        if kind in _KINDS and _is_operation(nodes, index):
            rows.append(_stated(nodes, index, _KINDS[kind], members))
        elif name.startswith(ANNOTATED):
            rows.append(_called(name, index, called, announced.get(int(nodes.whole["rf_id"][index]), -1)))
    picked = np.array([row.node for row in rows], dtype=np.intp)
    unknown = sum(row.name in _SHARES and row.size_bytes < 0 for row in rows)
    notes = (
        [f"{unknown} collectives state the bytes of each rank, but not how many ranks there are."]
        if unknown
        else []
    )
    return Communication(
        index=picked,
        kind=texts([row.kind for row in rows]),
        name=texts([row.name for row in rows]),
        group=texts([names.get(row.group, row.group) for row in rows]),
        sequence=_sequences(rows, nodes),
        size_bytes=ints([row.size_bytes for row in rows]),
        peer=ints([row.peer for row in rows]),
        bucket=nodes.whole["headway_bucket"][picked],
        algorithm=nodes.text["headway_algorithm"][picked],
        notes=tuple(notes),
    )


def _is_operation(nodes: Nodes, index: int) -> bool:
    """Older converters write the host's calls as communication as well, without saying of which kind."""
    return not nodes.on_host[index] or nodes.whole["comm_type"][index] >= 0


def _stated(nodes: Nodes, index: int, kind: str, members: Mapping[str, int]) -> _Row:
    whole = {name: int(column[index]) for name, column in nodes.whole.items()}
    group = str(nodes.text["pg_name"][index])
    size_bytes = whole["comm_size"] if whole["comm_size"] >= 0 else whole["tensor_size"]
    if kind == Kind.SEND:
        return _Row(index, kind, "send", group, size_bytes, whole["comm_dst"])
    if kind == Kind.RECEIVE:
        return _Row(index, kind, "receive", group, size_bytes, whole["comm_src"])
    known = 0 <= whole["comm_type"] < len(COLLECTIVES)
    name = COLLECTIVES[whole["comm_type"]] if known else unprefixed(str(nodes.name[index]), "COMM_COLL_NODE")
    if name in _SHARES:
        ranks = members.get(group, 0)
        size_bytes = min(size_bytes * ranks, 2**62) if ranks > 0 and size_bytes >= 0 else -1
    exactly = whole["headway_size"]
    return _Row(index, kind, name, group, exactly if exactly >= 0 else size_bytes)


def _called(name: str, index: int, called: ExecutedCommunication, row: int) -> _Row:
    """One of Gloo's, by the call that it belongs to: what is announced as an all_reduce may be a reduce_scatter."""
    plain = str(called.name[row]) if row >= 0 else plain_name(name.removeprefix(ANNOTATED))
    kind = {"send": Kind.SEND, "receive": Kind.RECEIVE}.get(plain, Kind.COLLECTIVE)
    if row < 0:
        return _Row(index, kind, plain)
    return _Row(index, kind, plain, "", int(called.size_bytes[row]), int(called.peer[row]))


def _sequences(rows: list[_Row], nodes: Nodes) -> Ints:
    """The sequence numbers that are stated, or else collectives counted within groups, in the order of their ids."""
    found = nodes.whole["headway_sequence"][[row.node for row in rows]] if rows else ints([])
    counted: Counter[str] = Counter()
    for at in sorted(range(len(rows)), key=lambda at: nodes.id[rows[at].node]):
        if found[at] < 0 and rows[at].kind == Kind.COLLECTIVE:
            found[at] = counted[rows[at].group]
            counted[rows[at].group] += 1
    return found
