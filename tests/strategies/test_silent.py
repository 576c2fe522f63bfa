"""Ranks that meet a failure name those who do not: the same on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch.distributed as dist

from headway import torch_private
from headway.strategies import silent

RANKS = range(4)
rank_of = threading.local()


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = torch_private.JobStore(cast(Any, dist).HashStore())
    monkeypatch.setattr(dist, "get_rank", lambda: rank_of.number)
    monkeypatch.setattr(torch_private, "default_store", lambda _limit_s: shared)
    monkeypatch.setattr(silent, "PATIENCE_S", 1.0)
    monkeypatch.setattr(silent, "GRACE_S", 0.3)
    monkeypatch.setattr(silent, "LINGER_S", 0.0)


def said_by(ranks: dict[int, dict[str, Any]], act: Callable[..., Any] = silent.silent_ranks) -> set[Any]:
    """What each of ``ranks`` finds, each with its own arguments."""

    def on(number: int) -> Any:
        rank_of.number = number
        return act("failure", RANKS, **ranks[number])

    with ThreadPoolExecutor(len(ranks)) as pool:
        return set(pool.map(on, ranks))


def test_who_waited_in_vain_names_who_does_not_say_so() -> None:
    assert said_by({0: {}, 1: {}, 3: {}}) == {(2,)}


def test_a_neighbour_that_closed_its_connection_because_of_another_is_not_named() -> None:
    """Rank 1 has lost rank 2, and ended its connection to rank 0."""
    assert said_by({0: {"neighbour": 1}, 1: {"neighbour": 2}, 3: {"neighbour": 2}}) == {(2,)}


def test_who_cannot_know_waits_for_the_word_of_who_can() -> None:
    assert said_by({0: {"neighbour": 1}, 1: {}, 3: {"decides": False}}) == {(2,)}


def test_nobody_is_named_where_all_met_it() -> None:
    assert said_by({rank: {} for rank in RANKS}) == {()}
    assert silent.in_words(()) == "another rank has ended or cannot be reached"


def test_a_rank_that_gives_up_is_the_one() -> None:
    rank_of.number = 3
    silent.gives_up("failure")
    assert said_by({0: {"neighbour": 1}, 1: {}}) == {(3,)}
