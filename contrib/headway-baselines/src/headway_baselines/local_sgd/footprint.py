"""What local SGD holds: a flat copy that is averaged; for outer steps also where a period began, and a momentum."""

from __future__ import annotations

from headway.model import ModelSpec
from headway.strategies.footprint import Footprint
from headway_baselines.local_sgd.schedule import PeriodicSchedule


def averaged_bytes(model: ModelSpec, schedule: PeriodicSchedule) -> int:
    """What ranks average at the end of a period: parameters, and moments where they are averaged too.

    Statistics of normalisation layers, which a model does not tell from other buffers, are left out.
    """
    return model.size_bytes + (model.optimizer_state_bytes or 0) * (schedule.moments == "averaged")


def footprint(model: ModelSpec, schedule: PeriodicSchedule) -> Footprint:
    """What one rank holds. Gradients are its own, and in no buckets."""
    outer = schedule.outer
    copies = 0 if outer is None else 1 + (outer.momentum > 0)
    return Footprint(
        buffers_bytes=averaged_bytes(model, schedule) + copies * model.size_bytes,
        state_bytes=model.optimizer_state_bytes or 0,
        gradients_apart=True,
        updated_share=1.0,
    )
