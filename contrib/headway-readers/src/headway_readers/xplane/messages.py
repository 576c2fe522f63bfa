"""The messages of XSpace and of XLA's programs, as protobuf's library wants them described.

Names and numbers are those of TensorFlow's ``xplane.proto`` and of XLA's ``hlo.proto`` and ``xla_data.proto``; only
what is looked at is described, and the library skips the rest. Texts are described as bytes, since nothing hinders a
name from being no UTF-8, and maps as the lists of keys and values that they are written as.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

_SPACE: dict[str, dict[str, tuple[int, str]]] = {
    "Space": {"planes": (1, "*Plane"), "hostnames": (4, "*bytes")},
    "Plane": {
        "name": (2, "bytes"), "lines": (3, "*Line"), "event_metadata": (4, "*EventMetadataEntry"),
        "stat_metadata": (5, "*StatMetadataEntry"), "stats": (6, "*Stat"),
    },
    "Line": {
        "name": (2, "bytes"), "timestamp_ns": (3, "int64"), "events": (4, "*Event"), "display_name": (11, "bytes"),
    },
    "Event": {
        "metadata_id": (1, "int64"), "offset_ps": (2, "int64"), "duration_ps": (3, "int64"), "stats": (4, "*Stat"),
        "num_occurrences": (5, "int64"),
    },
    "Stat": {
        "metadata_id": (1, "int64"), "double_value": (2, "double"), "uint64_value": (3, "uint64"),
        "int64_value": (4, "int64"), "str_value": (5, "bytes"), "bytes_value": (6, "bytes"), "ref_value": (7, "uint64"),
    },
    "EventMetadataEntry": {"key": (1, "int64"), "value": (2, "EventMetadata")},
    "EventMetadata": {"id": (1, "int64"), "name": (2, "bytes"), "display_name": (4, "bytes"), "stats": (5, "*Stat")},
    "StatMetadataEntry": {"key": (1, "int64"), "value": (2, "StatMetadata")},
    "StatMetadata": {"id": (1, "int64"), "name": (2, "bytes")},
}  # fmt: skip

_PROGRAM: dict[str, dict[str, tuple[int, str]]] = {
    "Program": {"module": (1, "Module")},
    "Module": {"name": (1, "bytes"), "computations": (3, "*Computation"), "device_assignment": (15, "Assignment")},
    "Computation": {"instructions": (2, "*Instruction"), "id": (5, "int64"), "root_id": (6, "int64")},
    "Instruction": {
        "name": (1, "bytes"), "opcode": (2, "bytes"), "shape": (3, "Shape"), "metadata": (7, "Metadata"),
        "channel_id": (26, "int64"), "id": (35, "int64"), "operand_ids": (36, "*int64"),
        "called_computation_ids": (38, "*int64"), "replica_groups": (49, "*Group"),
        "use_global_device_ids": (71, "bool"), "device_list": (87, "DeviceList"), "iota_list": (92, "IotaList"),
        "mesh_list": (93, "MeshList"),
    },
    "Shape": {"element_type": (2, "int32"), "dimensions": (3, "*int64"), "tuple_shapes": (4, "*Shape")},
    "Metadata": {"op_name": (2, "bytes")},
    "Group": {"replica_ids": (1, "*int64")},
    "DeviceList": {"replica_groups": (1, "*Group"), "iota": (2, "IotaList")},
    "IotaList": {
        "groups": (1, "int64"), "devices_a_group": (2, "int64"), "dimensions": (3, "*int64"), "order": (4, "*int32"),
    },
    "MeshList": {"mesh": (1, "Mesh"), "axes": (2, "*AxisRef")},
    "Mesh": {"axes": (1, "*MeshAxis"), "device_ids": (2, "*int64")},
    "MeshAxis": {"size": (2, "int64")},
    "AxisRef": {"index": (1, "int64"), "part": (2, "AxisPart")},
    "AxisPart": {"before": (1, "int64"), "size": (2, "int64")},
    "Assignment": {"replica_count": (1, "int32"), "computation_count": (2, "int32")},
}  # fmt: skip


def space_class(name: str) -> Any:
    """The class of one of XSpace's messages, without the X of its name."""
    return _classes("space")[name]


def program_class() -> Any:
    """The class of a compiled program, which XLA calls HloProto."""
    return _classes("program")["Program"]


def submessages(name: str) -> dict[int, str]:
    """Which of the fields of XSpace's message ``name`` hold which messages, by number."""
    return {number: kind.lstrip("*") for number, kind in _SPACE[name].values() if kind.lstrip("*") in _SPACE}


@cache
def _classes(which: str) -> Mapping[str, Any]:
    from google.protobuf import (  # type: ignore[import-untyped]
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    described = {"space": _SPACE, "program": _PROGRAM}[which]
    package = f"headway.{which}"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in described.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = field.LABEL_REPEATED if kind.startswith("*") else field.LABEL_OPTIONAL
            plain = kind.lstrip("*")
            if plain in described:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{package}.{plain}"
            else:
                field.type = getattr(field, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in described
    }
