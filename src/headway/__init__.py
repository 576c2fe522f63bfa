"""Headway: see, predict and choose the communication of distributed training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.cluster import Cluster
from headway.errors import HeadwayError
from headway.plan import Plan
from headway.trace.folder import load_trace
from headway.trace.format import Trace
from headway.version import __version__

if TYPE_CHECKING:
    from headway.integrations.parallelize import parallelize
    from headway.recording.attach import record

__all__ = ["Cluster", "HeadwayError", "Plan", "Trace", "__version__", "load_trace", "parallelize", "record"]

# These import torch, which takes seconds; the command line mostly does without.
_LAZY = {"parallelize": "headway.integrations.parallelize", "record": "headway.recording.attach"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value  # importing a submodule of this name has bound the module
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
