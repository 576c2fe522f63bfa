"""The time of one collective, by NCCL's model and by replay."""

from __future__ import annotations

import pytest

from headway.errors import UserError
from headway.prediction.clusters import cluster_named
from headway.prediction.collective import collective_time


@pytest.mark.parametrize("name", ["hdr-200g-nvlink", "edr-100g-pcie", "gloo-10gbe"])
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce_scatter"])
def test_no_collective_beats_its_bound_and_large_ones_come_near(name: str, kind: str) -> None:
    cluster = cluster_named(name)
    for size_bytes in (1, 2**10, 2**20, 2**30):
        found = collective_time(cluster, kind, size_bytes)
        assert found.bound_us <= found.time_us
    assert found.bound_us > 0.3 * found.time_us
    assert found.bus_gb_s == pytest.approx(found.tensor_gb_s * (2 if kind == "all-reduce" else 1), rel=0.1)


def test_what_is_no_collective_is_refused() -> None:
    with pytest.raises(
        UserError, match="--collective: unknown name; got 'all-together'; expected all-reduce"
    ):
        collective_time(cluster_named("gloo-10gbe"), "all-together", 2**20)
    with pytest.raises(UserError, match="one worker"):
        collective_time(cluster_named("gloo-10gbe").resized(1), "all-reduce", 2**20)
