"""What ranks tell each other of their coordinator through a store that nobody protects."""

from __future__ import annotations

import json

import pytest

from headway.strategies.partial_all_reduce import meeting
from headway.strategies.partial_all_reduce.coordinator.child import ADDRESS_VARIABLE, SECRET_VARIABLE
from headway.strategies.partial_all_reduce.coordinator.options import GeneratorChoice

CHOICE = GeneratorChoice("first-come")
SECRET = "a secret that a user has made for many jobs"


def test_a_secret_of_the_environment_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "10.0.0.1:29650")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    told = meeting._offered(CHOICE, "10.0.0.2", together=False)
    assert told == {"address": "10.0.0.1:29650", "in_environment": True}
    peers = meeting._for_peers(SECRET.encode())
    assert len(peers) == 32
    assert peers != meeting._for_peers(b"another")


def test_a_coordinator_without_a_secret_is_told_with_a_new_one_for_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "127.0.0.1:29650")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    told = [json.loads(json.dumps(meeting._offered(CHOICE, "127.0.0.1", together=True))) for _ in range(2)]
    assert [(each["in_environment"], each["secret"]) for each in told] == [(False, None)] * 2
    assert told[0]["peers"] != told[1]["peers"]


def test_models_that_are_wrapped_one_after_the_other_share_a_coordinator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    first, again = (meeting._offered(CHOICE, "127.0.0.1", together=True) for _ in range(2))
    try:
        assert first["address"] == again["address"]
        assert first["secret"] == again["secret"]
    finally:
        for process in meeting._started.values():
            process.close()
        meeting._started.clear()
