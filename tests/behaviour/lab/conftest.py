"""What holds for every test of the lab: a folder of labs of its own, in which nothing stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.behaviour.lab.jobs import permitted

from headway.lab import state
from headway.lab.launch import Mode


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(params=["root", "user"])
def namespaced(request: pytest.FixtureRequest) -> Mode:
    return permitted(request.param)


@pytest.fixture(params=["root", "user", "loopback"])
def any_mode(request: pytest.FixtureRequest) -> Mode:
    return permitted(request.param)


@pytest.fixture(autouse=True)
def nothing_stays(own_folder: None) -> Iterator[None]:
    """Held against this test's own folder of labs, so that it must end before that folder is forgotten."""
    yield
    assert [lab for lab in state.labs() if lab.pids] == []
