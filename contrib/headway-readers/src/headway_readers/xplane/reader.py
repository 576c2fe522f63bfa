"""Profiles of TensorFlow and JAX in their binary form (xplane.pb)."""

from __future__ import annotations

from collections.abc import Sequence

from headway.ext import Companion, Document, Reading
from headway_readers.xplane.ranks import ranks_of
from headway_readers.xplane.space import read_space

_PLANES = (b"/host:", b"/device:", b"Task Environment", b"#Chip")
_PLANE, _IDENTIFIER, _NAME = b"\x0a", b"\x08", b"\x12"
_ENDINGS = (".xplane.pb", ".xplane.pb.gz")


def recognises(name: str, head: bytes) -> bool:
    """Whether a document is an XSpace: by how its first plane is called, or else by its own name."""
    if head[:1] != _PLANE:
        return name.endswith(_ENDINGS) and not head[:1].isspace() and head[:1] not in (b"{", b"[")
    rest = _after_number(head[1:])
    if rest.startswith(_IDENTIFIER):
        rest = _after_number(rest[1:])
    return name.endswith(_ENDINGS) or (rest[:1] == _NAME and _after_number(rest[1:]).startswith(_PLANES))


def read(document: Document, companions: Sequence[Companion] = ()) -> Reading:
    """Read a profile: a rank for each device, or for the process. Raises TraceError where it is damaged or empty."""
    return Reading(ranks=ranks_of(read_space(document)))


def _after_number(data: bytes) -> bytes:
    for place in range(min(len(data), 10)):
        if data[place] < 0x80:
            return data[place + 1 :]
    return b""
