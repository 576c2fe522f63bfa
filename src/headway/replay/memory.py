"""How many bytes a rank needs at its peak, by what it holds."""

from __future__ import annotations

from headway.model import ModelSpec
from headway.scheduling.buckets import BucketSchedule


def peak_bytes(model: ModelSpec, schedule: BucketSchedule, world_size: int) -> int:
    """Parameters, gradients, the strategy's bucket buffers, optimizer state, buffers and activations.

    Where parameters are gathered a rank holds the optimizer's state of its share only. Activations are the outputs of
    the innermost modules in one forward, an estimate: what autograd saves differs from operation to operation.
    """
    buckets = sum(bucket.size_bytes for bucket in schedule.buckets)
    gradients = model.size_bytes
    held = model.size_bytes + gradients + buckets
    sharded = schedule.gather == "parameters"
    state = -(-model.optimizer_state_bytes // world_size) if sharded else model.optimizer_state_bytes
    return held + state + model.buffer_bytes + model.activation_bytes
