"""A Chakra file as columns: its frames, its nodes, and what they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.arrays import Flags, Ints, Texts
from headway.errors import TraceError
from headway.interop.readers.chakra.frames import frames
from headway.interop.readers.chakra.schema import metadata_class, node_class
from headway.interop.readers.foreign import MAX_EVENTS, Document, damaged
from headway.interop.readers.torch_json import ints, whole
from headway.trace.events import texts

LONGEST_US = 2**61 // 1000  # so that an end can be counted in nanoseconds, too
INPUTS_OF = ("c10d::", "gloo:", "## process_group:init ##")  # nodes whose inputs are kept

_WHOLE = (
    "stream", "tid", "rf_id", "comm_type", "comm_size", "tensor_size", "comm_src", "comm_dst",
    "headway_sequence", "headway_bucket", "headway_size", "headway_asked",
)  # fmt: skip
_TEXT = ("pg_name", "headway_kind", "headway_algorithm")
_WANTED = frozenset([*_WHOLE, *_TEXT, "is_cpu_op"])


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """The nodes of a file as columns, in the file's order; -1, "" and () stand for what is not stated."""

    id: list[int]
    name: Texts
    type: Ints
    start_ns: Ints  # 0 where it is not stated
    duration_ns: Ints
    on_host: Flags  # computed by the host although there may be a device
    whole: dict[str, Ints]  # attributes that are integers
    text: dict[str, Texts]  # attributes that are text
    inputs: dict[int, str]  # the inputs of the nodes of INPUTS_OF
    data_deps: list[tuple[int, ...]]  # indices
    ctrl_deps: list[tuple[int, ...]]  # indices; a PyTorch trace names a node's caller here

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True, eq=False)
class ChakraDocument:
    """A file: what it says of itself, its nodes, and what had to be left out."""

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
        """Add a node, or say why it cannot be one."""
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
        """One attribute of every node; where a node states it twice, as it states it last."""
        kind = object if isinstance(otherwise, str) else type(otherwise)
        made = np.full(len(self.names), otherwise, dtype=kind)
        at, stated = self.attributes[name]
        made[at] = [convert(value) for value in stated]
        return made


def parse(document: Document) -> ChakraDocument:
    """Read a file's frames and nodes. Raises TraceError where it is damaged, unless it is read leniently."""
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
            failure = f"message {number} of {len(frame)} bytes that is no {'node' if number else 'metadata'}"
        if failure:
            dropped += 1
            wrong.append(failure)
        if wrong and not document.lenient:
            break
    nodes = _nodes(columns, wrong)
    if wrong and not document.lenient:
        raise damaged(document, wrong[0], expected="a whole Chakra trace")
    if not len(nodes):
        raise _empty(document)
    notes = [f"{document.name} is damaged ({_first(wrong)}): what could be read was kept."] if wrong else []
    return ChakraDocument(attributes, nodes, dropped, tuple(notes))


def _empty(document: Document) -> TraceError:
    return damaged(document, "no node that can be read", expected="a whole Chakra trace")


def _first(wrong: list[str]) -> str:
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _value(attribute: Any) -> Any:
    kind = attribute.WhichOneof("value")
    return getattr(attribute, kind) if kind else None


def _attributes(message: Any) -> dict[str, Any]:
    found = {one.name: _value(one) for one in message.attr}
    return {name: list(value.values) if hasattr(value, "values") else value for name, value in found.items()}


def _nodes(columns: _Columns, wrong: list[str]) -> Nodes:
    """Columns of arrays, with dependencies on nodes rather than ids.

    Files made from PyTorch name callers that were left out, and some nodes as their own callers; data that nobody makes
    is damage.
    """
    index = columns.index
    missing = next((one for deps in columns.data_deps for one in deps if one not in index), None)
    if missing is not None:
        wrong.append(f"a dependency on node {missing}, which is not there")
    return Nodes(
        id=list(index),
        name=texts(columns.names),
        type=ints(columns.types),
        start_ns=ints(columns.starts_us) * 1000,
        duration_ns=ints(columns.durations_us) * 1000,
        on_host=columns.column("is_cpu_op", False, bool),
        whole={name: columns.column(name, -1, whole) for name in _WHOLE},
        text={name: columns.column(name, "", _word) for name in _TEXT},
        inputs=columns.inputs,
        data_deps=[tuple(index[one] for one in deps if one in index) for deps in columns.data_deps],
        ctrl_deps=[
            tuple(index[one] for one in deps if index.get(one, own) != own)
            for own, deps in enumerate(columns.ctrl_deps)
        ],
    )
