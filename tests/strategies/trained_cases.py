"""What ranks do in test_policies: the test kit's training, under one strategy after the other."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from headway.ext.testing import train


def trained(rank: int, world_size: int, asked: list[tuple[str, bool]]) -> list[Any]:
    """What this rank ends with under each strategy that is asked for."""
    return [astuple(train(rank, world_size, name, {}, injected=injected)) for name, injected in asked]
