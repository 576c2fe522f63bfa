from __future__ import annotations

import pytest

from headway.integrations.launch import stated_world_size


@pytest.mark.parametrize(
    ("command", "environment", "ranks"),
    [
        ("torchrun --nproc-per-node 4 train.py", {}, 4),
        ("/opt/bin/torchrun --nproc_per_node=4 --nnodes=2 --node-rank 1 train.py --nproc-per-node 9", {}, 8),
        ("srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d -m job.train", {}, 16),
        ("python -m torch.distributed.run --standalone --nproc-per-node 2 train.py", {}, 2),
        ("torchrun train.py", {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "3"}, 6),
        ("torchrun --nproc-per-node 4 train.py", {"PET_NNODES": "1:3"}, None),
        ("torchrun --nproc-per-node gpu train.py", {}, None),
        ("torchrun --nproc-per-node 4 --nnodes 1:2 train.py", {}, None),
        ("torchrun --nproc 4 train.py", {}, None),
        ("torchrun --nproc-per-node 4 --nno 2 train.py", {}, None),
        ("torchrun --nproc-per-node", {}, None),
        ("torchrun train.py", {}, None),
        ("python torchrun.py --nproc-per-node 4 train.py", {}, None),
        ("true", {}, None),
    ],
)
def test_a_world_size_is_read_only_where_it_stands_plainly(
    command: str, environment: dict[str, str], ranks: int | None
) -> None:
    assert stated_world_size(command.split(), environment) == ranks
