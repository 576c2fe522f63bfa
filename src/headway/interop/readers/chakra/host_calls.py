"""What "chakra_converter PyTorch" keeps of an execution trace: process groups, and Gloo's calls.

Chakra knows communication by the names of NCCL's kernels, so that Gloo's is written as computation by the host.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headway.interop.readers.chakra.document import Nodes
from headway.interop.readers.executed import ExecutedCommunication, Gathered, Node, in_order_of_call
from headway.interop.readers.torch_json import UNREADABLE

_GROUPS = "## process_group:init ##"
ANNOTATED = "gloo:"
_WORDS = (("'", '"'), ("True", "true"), ("False", "false"), ("None", "null"))  # from Python's words to JSON's


def host_calls(nodes: Nodes) -> ExecutedCommunication:
    """Gloo's operations and the process groups, as an execution trace has them."""
    gathered = Gathered()
    kept = [
        Node(
            name=str(nodes.name[index]),
            id=index,
            inputs=_raw({"values": _values(str(nodes.name[index]), words)}),
            attrs=_raw([{"name": "rf_id", "value": int(nodes.whole["rf_id"][index])}]),
        )
        for index, words in nodes.inputs.items()
    ]
    for node in sorted(kept, key=in_order_of_call):
        gathered.take(node)
    return gathered.columns(0, ())


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _values(name: str, words: str) -> list[Any]:
    """The arguments of a call, which the converter writes as Python would show them."""
    if name == _GROUPS:
        return [words[words.find("[{") : words.rfind("}]") + 2]]
    for old, new in _WORDS:
        words = words.replace(old, new)
    try:
        found = msgspec.json.decode(words)
    except UNREADABLE:
        return []
    return found if isinstance(found, list) else []
