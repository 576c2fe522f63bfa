"""What the ranks of ``test_recorded`` do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tests.behaviour.decentralised import cases, job

FIRST, STOP = 3, 9


def recorded(rank: int, _world_size: int, folder: str, port: int, staleness: int) -> Any:
    """An ordinary loop of a model that is averaged in groups, recorded; returns its rounds."""
    from headway.recording.attach import record  # imports torch._dynamo, which takes seconds

    rounds: list[dict[str, Any]] = []
    module = job.model()
    with record(folder, first_step=FIRST, stop_step=STOP):
        optimizer = cases._sgd(module)
        wrapped = cases._wrapped(
            rank, port, module, initial="own", staleness=staleness,
            observer=lambda each: rounds.append(cases._as_json(each)),
        )  # fmt: skip
        for iteration in range(STOP + 2):
            cases._step(wrapped, optimizer, rank, iteration)
        wrapped.flush()
        wrapped.close()
        dist.barrier()
    return rounds
