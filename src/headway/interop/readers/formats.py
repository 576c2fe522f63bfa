"""The readers there are: Headway's own, and those that other packages name in the entry points ``headway.readers``."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import ClassVar, cast

from headway.interop.readers.foreign import Companion, Document, Reading
from headway.plugins import API_VERSION, answers, load_entry_points, why_unusable

GROUP = "headway.readers"
SNIFFED_BYTES = 65_536


class Reader(ABC):
    """Reads the documents of one format of another tool.

    ``name`` is what ``headway import --format`` takes, ``title`` says the format in a few words. ``yields_to`` are the
    names of formats in which the tool writes the same recording more fully: a document of this format is left out where
    one of those lies in the same folder. ``api_version`` is the version of ``headway.ext`` that it was written for.

    Methods import what is heavy when they are called.
    """

    api_version: ClassVar[int] = API_VERSION
    name: str
    title: str
    yields_to: frozenset[str] = frozenset()

    @abstractmethod
    def recognises(self, name: str, head: bytes) -> bool:
        """Whether a document looks like one of this format, by its name and its first SNIFFED_BYTES bytes, unpacked.

        It must not take documents of other formats. Headway's own readers are asked before those of other packages.
        """

    @abstractmethod
    def read(self, document: Document, companions: Sequence[Companion] = ()) -> Reading:
        """What a document holds, as a ForeignRank for each process that it tells of.

        ``companions`` is what other documents said of the same job, which most formats have no use for. Raises
        TraceError where the document is damaged or of another format, and nothing else, whatever its bytes. Where
        ``document.lenient``, it keeps what can be kept instead, and says in notes what was dropped.
        """


@dataclass(frozen=True)
class _Shipped(Reader):
    """One of Headway's own: functions ``recognises`` and ``read`` of a module, which is imported when used."""

    name: str
    title: str
    module: str

    def recognises(self, name: str, head: bytes) -> bool:
        return bool(self._module().recognises(name, head))

    def read(self, document: Document, companions: Sequence[Companion] = ()) -> Reading:
        return cast(Reading, self._module().read(document, companions))

    def _module(self) -> ModuleType:
        return importlib.import_module(f"headway.interop.readers.{self.module}")


# The first that recognises a document reads it: the more particular ones stand first.
SHIPPED = (
    _Shipped("flight-recorder", "PyTorch flight recorder (JSON)", "flight_recorder"),
    _Shipped("execution-trace", "PyTorch execution trace", "execution_trace"),
    _Shipped("kineto", "PyTorch Kineto (torch.profiler)", "kineto.reader"),
    _Shipped("chakra", "MLCommons Chakra execution trace", "chakra.reader"),
)


@cache
def readers() -> dict[str, Reader]:
    """All readers by the names of their formats, Headway's own first."""
    shipped: dict[str, Reader] = {reader.name: reader for reader in SHIPPED}
    outside = load_entry_points(GROUP, shipped, _fitting, "a Reader of that name")
    return shipped | {reader.name: reader for reader in outside}


def recognised(name: str, head: bytes) -> Reader | None:
    """The first reader that recognises a document; None where none does.

    One of another package that raises is left out, with a warning.
    """
    for format_name, is_recognised in answers(
        "reader", readers().items(), lambda reader: reader.recognises(name, head)
    ):
        if is_recognised:
            return readers()[format_name]
    return None


_SIGNS = {
    "xplane": rb"\A\n.{1,24}(/host:|/device:|Task Environment|#Chip)",
    "jax": rb'"name"\s*:\s*"/(host|device):',
    "mxnet": rb'"name"\s*:\s*"(cpu/\d+|cpu (pinned|shared)/\d*|MXNET_C_API|Device Storage)"',
    "horovod": rb'\A\s*\[.*("NEGOTIATE_|start_time_since_epoch_in_micros)',
}
"""How documents begin that CONTRIB reads, for messages where it is not installed."""


def why_not_recognised(name: str, head: bytes) -> str:
    """Which package that is not installed would read the document, in a sentence; "" where Headway knows of none."""
    for format_name, sign in _SIGNS.items():
        looks_like = format_name == "xplane" and name.endswith((".xplane.pb", ".xplane.pb.gz"))
        if format_name not in readers() and (looks_like or re.search(sign, head, re.DOTALL)):
            return f"{name} looks like the format {format_name}. The reader of " + why_unusable(
                GROUP, format_name
            )
    return ""


def _fitting(name: str, loaded: object) -> Reader | None:
    if isinstance(loaded, Reader) and getattr(loaded, "name", "") == name and hasattr(loaded, "title"):
        return loaded
    return None
