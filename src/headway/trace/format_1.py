"""Traces of format 1: events without stages and micro-batches."""

from __future__ import annotations

from typing import Any

from headway.trace.format import FORMAT


def upgraded(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest of format 1 in today's format. Rank files are read alike: what they lack is optional."""
    return manifest | {"format": FORMAT}
