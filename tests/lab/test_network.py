from __future__ import annotations

import pytest

from headway.lab.network import (
    BURST_BYTES,
    QUEUE_LEAST_BYTES,
    QUEUE_MOST_BYTES,
    address,
    bucket,
    packet_bytes,
)
from headway.lab.spec import MAX_HOSTS, MAX_RATE_GBPS, MIN_RATE_GBPS


@pytest.mark.parametrize("rate_gbps", [MIN_RATE_GBPS, 0.08, 1.0, MAX_RATE_GBPS])
def test_a_bucket_holds_a_whole_offload_packet_and_fits_the_kernels_fields(rate_gbps: float) -> None:
    settings = bucket(rate_gbps)
    assert settings["rate"] == round(rate_gbps * 1e9 / 8) < 2**32
    assert settings["burst"] >= BURST_BYTES > 64 * 2**10
    assert settings["burst"] / settings["rate"] * 1e9 / 64 < 2**32
    assert QUEUE_LEAST_BYTES <= settings["limit"] <= QUEUE_MOST_BYTES


@pytest.mark.parametrize(
    ("rate_gbps", "expected"), [(MIN_RATE_GBPS, 4096), (0.08, 10_000), (0.4, 50_000), (MAX_RATE_GBPS, 65_536)]
)
def test_packets_take_a_millisecond_at_most_but_on_the_slowest_links(rate_gbps: float, expected: int) -> None:
    assert packet_bytes(rate_gbps) == expected < BURST_BYTES


def test_addresses_are_distinct_and_valid() -> None:
    addresses = {address(index) for index in range(MAX_HOSTS)}
    assert len(addresses) == MAX_HOSTS
    assert max(int(text.rpartition(".")[2]) for text in addresses) < 255
