"""Schedules as pictures."""

from __future__ import annotations

from headway.scheduling.pipeline.orders import grouped, interleaved, zero_bubble
from headway.scheduling.pipeline.schedule import picture


def test_one_stage_a_rank() -> None:
    assert picture(grouped(2, 2, 1)).splitlines() == [
        "rank 0  F0 F1 ·  ·  B0 ── ·  B1 ──",
        "rank 1  ·  F0 B0 ── F1 B1 ── ·  ·",
    ]


def test_halved_backwards_and_several_stages() -> None:
    assert "I0 W0" in picture(zero_bubble(2, 2))
    assert picture(interleaved(2, 2, 2)).splitlines()[0].startswith("rank 0  0F0 0F1 2F0 2F1")
