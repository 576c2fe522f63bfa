"""Adapting: a job whose network becomes slow is tuned again, on every rank alike, and trains as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import workers
from tests.behaviour import adapting_cases

from headway.strategies.decisions import read_journal

CASES = "tests.behaviour.adapting_cases"
BEGAN = ("DDP, caps for 2 buckets", "parameter servers, keys of 0.1 MiB, 2 channels, serving 1:2:3")

ATTEMPTS = 3

pytestmark = pytest.mark.processes


def _flat(value: Any) -> list[float]:
    return [number for item in value for number in _flat(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("world_size", "begin_as"),
    [
        (2, None),
        (3, None),
        (2, {"bucket_caps_mb": [0.01, 0.4]}),
        (3, {"bucket_cap_mb": 0.1, "channels": 2, "shares": (1, 2, 3)}),
    ],
)
def test_a_network_that_becomes_slow_is_tuned_for(
    world_size: int, begin_as: dict[str, Any] | None, tmp_path: Path
) -> None:
    journal = tmp_path / "decisions"
    results = workers.run(world_size, f"{CASES}:slowed", str(journal), True, begin_as)
    reference = adapting_cases.alone(world_size)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert result["paced"] > 0
        assert _flat(result["parameters"]) == pytest.approx(
            _flat(reference["parameters"]), rel=1e-9, abs=1e-10
        )
        assert result["tuned"] == results[0]["tuned"]
        assert result["observer"] == "NullObserver"
    assert results[0]["tuned"] is not None
    reasons = [entry.reason for entry in read_journal(journal)]
    if begin_as is None or "channels" in begin_as:  # stock DDP's steps do not show why they are longer
        assert any("a byte of gradients takes" in reason for reason in reasons), reasons
    began = "" if begin_as is None else BEGAN["channels" in begin_as]
    assert read_journal(journal)[0].order.startswith(began)
    assert any(reason.startswith("tuned in") for reason in reasons), reasons


def test_where_one_link_becomes_slow_servers_that_spare_it_are_tried(tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        results = workers.run(3, f"{CASES}:with_one_slow_link", str(tmp_path / f"decisions{attempt}"))
        if not results[0]["tuned early"]:  # on a busy machine links can look slow, and unequal, before one is
            break
    reference = adapting_cases.alone(3)
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        assert _flat(result["parameters"]) == pytest.approx(
            _flat(reference["parameters"]), rel=1e-9, abs=1e-10
        )
        shares = [each["shares"] for each in result["tried"] if each.get("shares")]
        assert shares, result["tried"]
        assert all(each[2] < min(each[:2]) for each in shares), shares


def test_without_it_nothing_is_watched(tmp_path: Path) -> None:
    results = workers.run(2, f"{CASES}:slowed", str(tmp_path / "decisions"), False)
    for result in results:
        assert result["tuned"] is None
        assert not result["watched"]
        assert not result["decisions"]


def test_a_model_that_is_watched_is_let_go_of_with_its_last_reference() -> None:
    assert workers.run(2, f"{CASES}:dropped") == [True, True]
