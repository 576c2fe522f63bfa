"""What becomes of memory while it is watched, one after the other."""

from __future__ import annotations

from typing import NamedTuple


class Made(NamedTuple):
    """Memory ``key`` of ``size_bytes`` is there from now on."""

    key: int
    size_bytes: int


class Gone(NamedTuple):
    """Memory ``key`` is there no more; it had ``size_bytes``."""

    key: int
    size_bytes: int


class Added(NamedTuple):
    """What is in ``source`` was added to what is in ``key``, in place."""

    key: int
    source: int


class Inner(NamedTuple):
    """An operator held ``size_bytes`` while it ran."""

    size_bytes: int


Change = Made | Gone | Added | Inner
