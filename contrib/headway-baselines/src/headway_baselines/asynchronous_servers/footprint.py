"""What a rank holds as a worker and as a server: a share of everything, and room for what is pushed and pulled."""

from __future__ import annotations

from headway.model import ModelSpec
from headway.strategies.footprint import Footprint
from headway_baselines.asynchronous_servers.schedule import ShardSchedule


def footprint(model: ModelSpec, schedule: ShardSchedule) -> Footprint:
    """What one rank holds: its share of parameters and of the optimizer's state; all gradients as they are pushed,
    all parameters as they are pulled, and as a server one push and one answer of its share for each worker.
    """
    share_bytes = max(schedule.sizes_bytes)
    return Footprint(
        buffers_bytes=share_bytes + 2 * model.size_bytes + 2 * schedule.world_size * share_bytes,
        state_bytes=-(-(model.optimizer_state_bytes or 0) // schedule.world_size),
        gradients_apart=True,
        updated_share=1 / schedule.world_size,
    )
