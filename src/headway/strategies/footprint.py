"""What a strategy has a rank hold in memory: the value that every strategy's ``memory.py`` gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """``buffers_bytes`` for good (buckets, scratch), and ``state_bytes`` of the optimizer's state.

    ``gradients_apart`` says that gradients have memory of their own apart from the buffers, from when they are complete
    until they are set to None. ``updated_share`` is how much of all parameters is updated at a time while all of them
    are there. ``passes_in_flight`` forwards have not come back in a backward, at most.
    """

    buffers_bytes: int
    state_bytes: int
    gradients_apart: bool
    updated_share: float
    passes_in_flight: int = 1
