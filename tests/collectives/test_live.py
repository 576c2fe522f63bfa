"""The live executor moves and adds exactly what the chunk programs say."""

from __future__ import annotations

import pytest
from tests import workers

from headway.collectives import live


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(world_size: int) -> None:
    for problems in workers.run(world_size, "tests.collectives.live_cases:check_all"):
        assert problems == []


@pytest.mark.parametrize(("numel", "chunks", "largest"), [(0, 3, 0), (1, 3, 1), (6, 3, 2), (7, 3, 3)])
def test_scratch_holds_the_largest_chunk(numel: int, chunks: int, largest: int) -> None:
    assert live.scratch_numel(numel, chunks) == largest
