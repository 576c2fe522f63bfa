from __future__ import annotations

from headway.lab.traffic import chunk_bytes


def test_chunks_are_ten_milliseconds_within_bounds() -> None:
    assert chunk_bytes(0.008) == 10_000
    assert chunk_bytes(1e-9) == 1
    assert chunk_bytes(30.0) == 64 * 2**10
