"""What a strategy has a rank hold in memory, and what a rank holds at each moment of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headway.model import ModelSpec


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


class HeldMoment(NamedTuple):
    """What a rank holds at most up to a moment of its step, in addition to what is there all the time.

    ``what`` is FORWARD, the parameter whose gradient is then complete, AFTER (until the update) or UPDATE.
    """

    what: str
    gradient_bytes: int
    working_bytes: int


FORWARD, AFTER, UPDATE = "forward", "after backward", "update"


def constant_bytes(model: ModelSpec, held: Footprint) -> int:
    """What a rank always holds: parameters, frozen ones too, buffers, the optimizer's state and the strategy's."""
    return model.size_bytes + model.frozen_bytes + model.buffer_bytes + held.state_bytes + held.buffers_bytes


def held_moments(model: ModelSpec, held: Footprint) -> Iterator[HeldMoment]:
    """What is held in addition at each moment that may be the peak, in order; without a watched pass, roughly."""
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
