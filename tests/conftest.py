"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings
from tests import limits

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("headway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headway")

# Where it is set, each of some thousand processes would compile every module of Headway anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LABS = ("tests/behaviour/test_lab.py", "tests/behaviour/test_record_in_lab.py", "tests/lab/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup``: a file is run by one process, and so are all labs, unless a test says otherwise."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            file = item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group("labs" if file.startswith(LABS) else file))


def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """The time limit of a test is one that a busy machine stretches."""
    if settings.method != "signal":
        return None
    limit = limits.Limit(settings.timeout, lambda: [os.getpid()])

    def look(_signal: int, _frame: Any) -> None:
        left_s = limit.left_s()
        if left_s > 0:
            signal.setitimer(signal.ITIMER_REAL, left_s)
        else:
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
