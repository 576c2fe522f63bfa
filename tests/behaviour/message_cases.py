"""What ranks do for the test of messages in recordings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import headway

STEPS = 6
NUMBERS = 1000  # of 4 bytes, in a message forward
LATE_S = 0.02


def recorded(rank: int, _world_size: int, folder: str) -> dict[str, Any]:
    """Train a model, and send numbers from rank 0 to rank 1 and back in each step, by every function there is."""
    pair = dist.new_group([1, 0])
    other = 1 - rank
    received = []
    with headway.record(Path(folder) / "trace", first_step=2, stop_step=STEPS):
        model = DistributedDataParallel(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            forward, back = torch.full((NUMBERS,), float(step)), torch.zeros(2 * NUMBERS)
            if rank == 0:
                time.sleep(LATE_S)
                dist.send(forward, 1, group=pair)
                received.append(float(forward[0]))
                dist.irecv(back, 1).wait()  # type: ignore[union-attr]
            else:
                dist.recv(forward, 0, group=pair)
                received.append(float(forward[0]))
                dist.isend(back, 0).wait()  # type: ignore[union-attr]
            own, theirs = torch.tensor([rank]), torch.tensor([-1])
            operations = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, theirs, other)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            assert int(theirs) == other
            if rank == 0:
                dist.send(own, 1)
            else:
                assert dist.recv(theirs) == 0
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    if rank == 0:  # as if there had been no recording
        dist.send(own, 1)
    else:
        dist.recv(theirs, 0)
    after = [dist.ProcessGroup.send, dist.ProcessGroup.recv, dist.Work.wait]
    return {"received": received, "undone": not any(hasattr(each, "__wrapped__") for each in after)}
