"""Wrapped models give back what was made for them: a sweep in one process grows by nothing."""

from __future__ import annotations

import pytest
from tests import workers

pytestmark = pytest.mark.processes

CASES = "tests.behaviour.connection_cases"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("decoupled", 40),
        ("parameter_server", 20),
        pytest.param("decoupled", 200, marks=pytest.mark.exhaustive),
        pytest.param("parameter_server", 40, marks=pytest.mark.exhaustive),
    ],
)
def test_over_many_models_nothing_grows(kind: str, count: int) -> None:
    for held in workers.run(2, f"{CASES}:many_models", kind, count, timeout_s=800):
        threads, descriptors = held["most"]
        # Questions of peers come and go.
        assert threads <= held["tenth"][0] + 12
        assert descriptors <= held["tenth"][1] + 12
        assert all(after <= before for after, before in zip(held["after"], held["before"], strict=True)), held


def test_an_idle_job_wakes_no_more_threads_than_ddp() -> None:
    for waking in workers.run(2, f"{CASES}:waking_threads", timeout_s=200):
        assert waking["decoupled"] <= waking["ddp"]
        assert waking["parameter_server"] <= waking["ddp"]
