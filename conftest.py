"""What holds for all tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings
from tests import exhaustive, limits
from xdist.scheduler import LoadScopeScheduling

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile(
    "headway",
    deadline=None,
    max_examples=exhaustive.examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("headway")

# Where it is set, each of some thousand processes would compile every module of Headway again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Several processes share the cores: threads of OpenMP would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Thousands of tests and modules live until the end: to go through them again and again takes a sixth of all time.
gc.set_threshold(50_000, 20, 100)

FILE_BUDGET_S = {True: 20.0, False: 4.0}
"""How long the default tests of one file may take (with processes, without), as CONTRIBUTING says."""

LABS = ("tests/behaviour/lab/", "tests/behaviour/test_record_in_lab.py", "tests/lab/")


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """With ``--dist loadfile``: a file's tests are run by one process, as they share recordings, and so are all labs.

    What ``test_same_as_in_one_process`` shares are launches of ranks, of which each may be in another process.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.startswith(LABS):
            return "labs"
        launch = re.match(r"test_same_as_in_one_process\[(\w+-\d)-", test)
        return f"{file} {launch[1]}" if launch else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """The scheduler above, for the option that comes nearest."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """What has been imported and collected stays."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest begins first; what the list of exhaustive tests names is marked."""
    exhaustive.mark(items)
    if config.args == config.getini("testpaths") and (problems := list(exhaustive.problems(items))):
        raise pytest.UsageError("tests/exhaustive.yaml: " + "; ".join(problems))
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.fixture(autouse=True)
def as_if_nothing_had_been_compiled() -> Iterator[None]:
    """A recording takes other ways in a process that has compiled: none of a test before shall be seen by the next."""
    yield
    if "torch._dynamo" not in sys.modules:
        return
    import torch

    from headway import torch_private

    if torch_private.has_compiled():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


HARD_LIMITS = 3  # after so many time limits the process that runs a test is ended


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
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    # No handler of a signal runs while C++ waits for a lock inside the interpreter.
    faulthandler.dump_traceback_later(HARD_LIMITS * settings.timeout, exit=True)
    return True


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the files over their budget, where all tests are run: a busy machine exceeds it, so nothing fails."""
    if config.args != config.getini("testpaths") and not config.getoption("verbose"):
        return
    seconds: dict[str, float] = defaultdict(float)
    has_processes: set[str] = set()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                if "processes" in report.keywords:
                    has_processes.add(file)
    over = {file: spent for file, spent in seconds.items() if spent > FILE_BUDGET_S[file in has_processes]}
    if over:
        terminalreporter.section("files over their time budget (see CONTRIBUTING)")
    for file, spent in sorted(over.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{spent:6.1f} s of {FILE_BUDGET_S[file in has_processes]:4.0f}  {file}")
    total = sum(seconds.values())
    terminalreporter.write_line(
        f"{total:6.0f} s in all tests together, {sum(over.values()):.0f} s of them in files over budget"
    )
