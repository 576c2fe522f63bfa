"""What a strategy has a rank hold in memory: the value that every strategy's ``memory.py`` gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """``buffers_bytes`` for good (buckets, scratch), and ``state_bytes`` of the optimizer's state.

    ``gradients_apart`` says that gradients have memory of their own beside the buffers, from when they are complete
    until they are set to None. ``update_bytes`` is what is updated at a time: all parameters, or a bucket.
    """

    buffers_bytes: int
    state_bytes: int
    gradients_apart: bool
    update_bytes: int
