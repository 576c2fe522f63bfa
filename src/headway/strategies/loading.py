"""Finding a strategy's drivers: ``runtime``, ``dataflow`` and ``memory`` stand beside its ``policy``."""

from __future__ import annotations

import importlib
from types import ModuleType

from headway.strategies.base import Strategy


def driver(strategy: Strategy, name: str) -> ModuleType:
    """The module ``name`` ("runtime", "dataflow" or "memory") of a strategy's folder."""
    folder = type(strategy).__module__.rpartition(".")[0]
    return importlib.import_module(f"{folder}.{name}")
