"""Which part of a step a node belongs to: by its own name, or else by that of whoever called it."""

from __future__ import annotations

import re

from headway.interop.readers.chakra.document import Nodes
from headway.trace.events import Kind

REST = "rest"  # computation of no part, in traces that Headway wrote
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
    """The kind that a name tells of, "" where it tells of none."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "")


def shown(name: str, kind: str) -> str:
    """What to call the event of a node: its layer, where the name is made of layer and phase."""
    found = _LAYER.match(name)
    return found[1] if found else unprefixed(name, f"COMP_NODE_{kind}")


def unprefixed(name: str, prefix: str) -> str:
    """``name`` without what Chakra's tools expect a node's name to begin with."""
    return name.removeprefix(prefix).removeprefix("_") if name.startswith(prefix) else name


def of_nodes(nodes: Nodes) -> list[str]:
    """The kind of each node, "" where neither it nor a caller tells of one."""
    names = nodes.name.tolist()
    told = {name: of_name(name) for name in set(names)}
    found: list[str | None] = [
        stated if stated in STATED else told[name] or None
        for stated, name in zip(nodes.text["headway_kind"].tolist(), names, strict=True)
    ]
    for node in range(len(nodes)):
        path = []
        at: int | None = node
        while at is not None and found[at] is None:
            found[at] = ""  # until it is known: who calls himself is not asked twice
            path.append(at)
            at = nodes.ctrl_deps[at][0] if nodes.ctrl_deps[at] else None
        kind = found[at] if at is not None else ""
        for one in path:
            found[one] = kind
    return [kind or "" for kind in found]
