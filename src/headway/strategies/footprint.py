"""Memory that a strategy adds on a rank, and memory of a rank at each moment of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headway.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a strategy adds: ``buffers_bytes`` (buckets, scratch) and ``state_bytes`` of the optimizer.

    ``gradients_apart``: gradients have memory separate from the buffers, from when they are complete until they are set
    to None. ``updated_share``: largest share of the parameters that is updated at once. ``passes_in_flight``: largest
    number of forward passes whose backward has not run yet.
    """

    buffers_bytes: int
    state_bytes: int
    gradients_apart: bool
    updated_share: float
    passes_in_flight: int = 1


class HeldMoment(NamedTuple):
    """Peak memory of a rank up to a moment of its step, beyond ``constant_bytes``.

    ``what`` is FORWARD, the name of the parameter whose gradient is then complete, AFTER (until the update) or UPDATE.
    """

    what: str
    gradient_bytes: int
    working_bytes: int


FORWARD, AFTER, UPDATE = "forward", "after backward", "update"


def constant_bytes(model: ModelSpec, held: Footprint) -> int:
    """Memory a rank always holds: all parameters, buffers, optimizer state and the strategy's buffers."""
    return model.size_bytes + model.frozen_bytes + model.buffer_bytes + held.state_bytes + held.buffers_bytes


def held_moments(model: ModelSpec, held: Footprint) -> Iterator[HeldMoment]:
    """Yield the moments of a step that may be its memory peak, in order; an estimate without a recorded pass."""
    memory = model.pass_memory
    if memory is None:
        ready = model.ready_parameters()
        backward = [
            (p.name, model.activation_bytes * (len(ready) - done) // len(ready))
            for done, p in enumerate(ready)
        ]
        yield HeldMoment(FORWARD, 0, model.activation_bytes)
        update_bytes = after_bytes = 0
    else:
        kept_bytes = model.size_bytes if memory.gradients_kept and held.gradients_apart else 0
        yield HeldMoment(FORWARD, kept_bytes, memory.forward_bytes)
        backward = list(memory.backward)
        update_bytes, after_bytes = memory.update_bytes, memory.after_bytes
    accumulate = memory is not None and memory.gradients_accumulate and held.gradients_apart
    gradient_bytes = model.size_bytes if accumulate else 0
    for name, working_bytes in backward:
        yield HeldMoment(name, gradient_bytes, working_bytes)
        if held.gradients_apart and not accumulate and name in model.by_name:
            gradient_bytes += model.by_name[name].size_bytes
    yield HeldMoment(AFTER, gradient_bytes, after_bytes)
    yield HeldMoment(UPDATE, gradient_bytes, round(update_bytes * held.updated_share))
