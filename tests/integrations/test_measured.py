"""Whether the ranks of a job all come to measure: an answer that is the same on all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from headway import torch_private
from headway.integrations import measured

RANKS = 3


def answers(monkeypatch: pytest.MonkeyPatch, wanted: list[bool]) -> list[bool]:
    """What each rank gets that comes and wants so."""
    store = HashStore()
    monkeypatch.setattr(torch_private, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda own: measured._all_come("key", wanted=own), wanted))


def test_all_measure_where_all_want_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(monkeypatch, [True] * RANKS) == [True] * RANKS


@pytest.mark.parametrize("unwilling", range(RANKS))
def test_nobody_measures_where_one_does_not_want_to(monkeypatch: pytest.MonkeyPatch, unwilling: int) -> None:
    assert answers(monkeypatch, [rank != unwilling for rank in range(RANKS)]) == [False] * RANKS


def test_nobody_measures_where_one_does_not_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MEASURING_PATIENCE_S", 0.2)
    assert answers(monkeypatch, [True] * (RANKS - 1)) == [False] * (RANKS - 1)
    assert answers(monkeypatch, [True] * RANKS) == [True] * RANKS
