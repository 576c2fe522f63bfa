"""Time limits of tests: load stretches them, work defers them, a hang does not."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from tests import commands, limits


class Machine:
    """Time and load as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.stretch, self.used_s = 0.0, 1.0, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(limits, "stretch", lambda: self.stretch)
        monkeypatch.setattr(limits, "_used_s", lambda _: self.used_s)

    def wait(self, seconds: float, working: float = 0.0) -> None:
        self.now_s += seconds
        self.used_s += seconds * working


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_what_hangs_on_an_idle_machine_is_over_soon_after_its_limit(machine: Machine) -> None:
    limit = limits.Limit(60.0)
    assert limit.left_s() == 60.0
    machine.wait(60.0)
    assert 0.0 < limit.left_s() <= limits.LOOK_S
    machine.wait(limits.LOOK_S)
    assert limit.over()


def test_load_that_came_after_the_beginning_stretches_a_limit(machine: Machine) -> None:
    limit = limits.Limit(60.0)
    machine.stretch = 15.0
    machine.wait(60.0)
    assert limit.left_s() == pytest.approx(60.0 * 14)
    machine.stretch = 1.0  # and it is not taken back when load goes
    assert limit.left_s() == pytest.approx(60.0 * 14)


def test_what_works_is_waited_for_but_not_for_ever(machine: Machine) -> None:
    limit = limits.Limit(60.0)
    while not limit.over():
        machine.wait(5.0, working=0.5)
    assert 60.0 * limits.CAP < machine.now_s <= 60.0 * limits.CAP + 2 * limits.LOOK_S


def test_work_of_descendants_is_seen() -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint('spun', flush=True)\ninput()"
    shell = ["sh", "-c", '"$0" -c "$1"; :', sys.executable, spin]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert limits._used_s([process.pid]) >= 0.2
        process.communicate("\n")
    assert limits._used_s([process.pid]) == 0.0


def test_a_command_that_hangs_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOK_S", 0.3)
    monkeypatch.setattr(limits, "stretch", lambda: 1.0)
    with pytest.raises(AssertionError, match=r"took longer than 0\.5 s") as failure:
        commands.run(["sh", "-c", "echo started; sleep 600 & echo $!; wait"], 0.5)
    started, child = str(failure.value).split("\n")[1:3]
    assert started == "started"
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(int(child), 0)
