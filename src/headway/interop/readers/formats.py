"""The supported trace formats, and how a document's format is detected."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from headway.interop.readers.foreign import Companion, Document, Reading

SNIFFED_BYTES = 65_536


@dataclass(frozen=True)
class Format:
    """One format. ``module``, imported when used, has ``recognises(name, head)`` and ``read(document, companions)``.

    ``recognises`` gets the document's name and its first SNIFFED_BYTES bytes, unpacked. ``read`` gets what other
    documents said of the same job, which most formats have no use for. It raises TraceError and nothing else,
    whatever the bytes.
    """

    name: str  # what ``--format`` takes
    title: str
    module: str

    def recognises(self, name: str, head: bytes) -> bool:
        """Whether a document looks like one of this format."""
        recogniser = cast(Callable[[str, bytes], bool], self._function("recognises"))
        return recogniser(name, head)

    def read(self, document: Document, companions: Sequence[Companion] = ()) -> Reading:
        """Read a document. Raises TraceError where it is damaged or of another format."""
        reader = cast(Callable[[Document, Sequence[Companion]], Reading], self._function("read"))
        return reader(document, companions)

    def _function(self, name: str) -> object:
        return getattr(importlib.import_module(f"headway.interop.readers.{self.module}"), name)


# The first that recognises a document reads it: the more particular ones stand first.
FORMATS = (
    Format("flight-recorder", "PyTorch flight recorder (JSON)", "flight_recorder"),
    Format("execution-trace", "PyTorch execution trace", "execution_trace"),
    Format("kineto", "PyTorch Kineto (torch.profiler)", "kineto.reader"),
    Format("chakra", "MLCommons Chakra execution trace", "chakra.reader"),
    Format("xplane", "TensorFlow and JAX XSpace (xplane.pb)", "xplane.reader"),
    Format("jax", "JAX and TensorFlow trace.json.gz", "jax_json"),
    Format("mxnet", "MXNet profiler", "mxnet"),
    Format("horovod", "Horovod timeline", "horovod"),
)
