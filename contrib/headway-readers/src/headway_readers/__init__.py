"""Readers of recordings that Headway cannot make: XSpace, and profiles of JAX and TensorFlow, MXNet and Horovod.

``headway import`` finds them by the entry points ``headway.readers``. Each module has ``recognises`` and ``read``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar, cast

from headway.ext import Companion, Document, Reader, Reading


class ModuleReader(Reader):
    """The functions ``recognises`` and ``read`` of a module, which is imported when a document is looked at."""

    api_version: ClassVar[int] = 1

    def __init__(
        self, name: str, title: str, module: str, *, yields_to: frozenset[str] = frozenset()
    ) -> None:
        self.name, self.title, self.yields_to = name, title, yields_to
        self._module_name = f"{__name__}.{module}"

    def recognises(self, name: str, head: bytes) -> bool:
        """As the module has it."""
        return bool(self._module().recognises(name, head))

    def read(self, document: Document, companions: Sequence[Companion] = ()) -> Reading:
        """As the module has it."""
        return cast(Reading, self._module().read(document, companions))

    def _module(self) -> ModuleType:
        return importlib.import_module(self._module_name)


XPLANE = ModuleReader("xplane", "TensorFlow and JAX XSpace (xplane.pb)", "xplane.reader")
JAX = ModuleReader(
    "jax", "JAX and TensorFlow trace.json.gz", "jax_json", yields_to=frozenset({"xplane"})
)  # the profilers of both write one recording in both formats: the XSpace says most
MXNET = ModuleReader("mxnet", "MXNet profiler", "mxnet")
HOROVOD = ModuleReader("horovod", "Horovod timeline", "horovod")
