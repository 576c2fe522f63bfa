"""What partial all-reduce holds: a copy that is averaged, so that a group that fails leaves the model as it was."""

from __future__ import annotations

from headway.model import ModelSpec
from headway.strategies.footprint import Footprint
from headway.strategies.partial_all_reduce.policy import PartialAllReduceStrategy


def averaged_bytes(model: ModelSpec, strategy: PartialAllReduceStrategy | None) -> int:
    """What the members of a group average: parameters, and the optimizer's state where that is averaged too."""
    moments = strategy is not None and strategy.moments == "averaged"
    return model.size_bytes + (model.optimizer_state_bytes or 0) * moments


def footprint(model: ModelSpec, staleness: int, ddp_bytes: int = 0) -> Footprint:
    """What one rank holds; with staleness also the parameters that its group began with.

    ``ddp_bytes`` are the buckets of ranks that all-reduce within hosts; then it is what the first rank of a host holds.
    Of averaged moments a copy is held too, which is not counted: a schedule does not tell.
    """
    return Footprint(
        buffers_bytes=model.size_bytes * (1 + staleness) + ddp_bytes,
        state_bytes=model.optimizer_state_bytes or 0,
        gradients_apart=True,
        updated_share=1.0,
    )
