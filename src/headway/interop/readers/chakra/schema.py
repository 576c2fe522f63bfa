"""The schema of MLCommons Chakra traces, as protobuf messages. A file holds one GlobalMetadata, then Nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from headway.errors import UserError, how_to_install

PACKAGE = "ChakraProtoMsg"


VERSION = "1.0.0"  # of the schema


class NodeType:
    """Chakra's types of nodes."""

    INVALID, METADATA, MEM_LOAD, MEM_STORE, COMP, SEND, RECEIVE, COLLECTIVE = range(8)


COLLECTIVES = (  # by the number in a node's attribute comm_type, as torch.distributed calls them
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip


_SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip


_NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
    "COMM_RECV_NODE", "COMM_COLL_NODE",
)  # fmt: skip


_METADATA = [("version", "string"), ("attr", "*AttributeProto")]


_INPUTS_OR_OUTPUTS = [("values", "string"), ("shapes", "string"), ("types", "string")]


_NODE = [
    ("id", "uint64"), ("name", "string"), ("type", "NodeType"), ("ctrl_deps", "*uint64"), ("data_deps", "*uint64"),
    ("start_time_micros", "uint64"), ("duration_micros", "uint64"), ("inputs", "IOInfo"), ("outputs", "IOInfo"),
    ("attr", "*AttributeProto"),
]  # fmt: skip


def node_class() -> Any:
    """The protobuf class of nodes. Raises UserError if protobuf is not installed."""
    return _classes()[0]


def metadata_class() -> Any:
    """The protobuf class of a file's metadata. Raises UserError if protobuf is not installed."""
    return _classes()[1]


@cache
def _classes() -> tuple[Any, Any]:
    try:
        from google.protobuf import (  # type: ignore[import-untyped]
            descriptor_pb2,
            descriptor_pool,
            message_factory,
        )
    except ImportError:
        raise UserError(
            "Chakra traces need the protobuf package, which is not installed",
            fix=f"Run: {how_to_install('traces')}.",
        ) from None
    pool = descriptor_pool.DescriptorPool()  # private: other tools may have registered Chakra's messages
    pool.Add(_describe(descriptor_pb2.FileDescriptorProto()))
    node, metadata = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in ("Node", "GlobalMetadata")
    )
    return node, metadata


def _describe(file: Any) -> Any:
    file.name, file.package, file.syntax = "headway/chakra.proto", PACKAGE, "proto3"
    types = file.enum_type.add(name="NodeType")
    for number, name in enumerate(_NODE_TYPES):
        types.value.add(name=name, number=number)
    attribute = _message(file, "AttributeProto", [("name", "string"), ("doc_string", "string")])
    attribute.oneof_decl.add(name="value")
    for index, kind in enumerate(_SCALARS):
        many = f"{kind.capitalize()}List"
        _message(file, many, [("values", f"*{kind}")])
        _field(attribute, f"{kind}_val", 3 + 2 * index, kind).oneof_index = 0
        _field(attribute, f"{kind}_list", 4 + 2 * index, many).oneof_index = 0
    _message(file, "GlobalMetadata", _METADATA)
    _message(file, "IOInfo", _INPUTS_OR_OUTPUTS)
    _message(file, "Node", _NODE)
    return file


def _message(file: Any, name: str, fields: Sequence[tuple[str, str]]) -> Any:
    """Add a message with fields numbered from 1; ``*`` before a kind means repeated."""
    message = file.message_type.add(name=name)
    for number, (field, kind) in enumerate(fields, 1):
        _field(message, field, number, kind)
    return message


def _field(message: Any, name: str, number: int, kind: str) -> Any:
    """Add a field; ``kind`` names a scalar type, or a message or enum of the package."""
    field = message.field.add(name=name, number=number)
    field.label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
    kind = kind.lstrip("*")
    if kind in _SCALARS:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
    else:
        field.type = field.TYPE_ENUM if kind == "NodeType" else field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
    return field
