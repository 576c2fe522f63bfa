"""``headway record --detail kernels`` on a job whose computation is a device's."""

from __future__ import annotations

from pathlib import Path

from tests.commands import headway, torchrun
from tests.gpu.setups import needs_gpu

from headway.diagnosis import diagnose
from headway.trace.events import Kind
from headway.trace.folder import load_trace


@needs_gpu
def test_kernels_are_recorded_in_their_phases(tmp_path: Path) -> None:
    out = tmp_path / "trace"
    command = torchrun("train_on_device.py", workers=1)
    done = headway("record", "-o", out, "--steps", "3:8", "--detail", "kernels", "--", *command)
    assert done.returncode == 0, done.stderr
    trace = load_trace(out)
    assert trace.steps == (3, 4, 5, 6, 7)
    events = trace.events[0]
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER):
        assert len(events.of_kind(kind)) >= len(trace.steps), kind
    assert diagnose(trace).verdict


@needs_gpu
def test_host_clocks_are_refused_for_a_device(tmp_path: Path) -> None:
    command = torchrun("train_on_device.py", workers=1)
    done = headway("record", "-o", tmp_path / "trace", "--", *command)
    assert done.returncode == 2
    assert "--detail kernels" in done.stderr
