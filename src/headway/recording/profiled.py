"""Records operators or device kernels with torch's profiler, for ``--detail operators`` and ``--detail kernels``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from headway.arrays import Ints
from headway.errors import UnsupportedError
from headway.recording.watch import Watch
from headway.trace.events import Events, Kind, Stream

Detail = Literal["modules", "operators", "kernels"]
_EXCHANGES = 16


class ProfiledSteps(Watch):
    """Profiles consecutive steps. Its events use the monotonic clock and the recorder's step numbers."""

    def __init__(self, detail: Detail, folder: Path, rank: int, first_step: int) -> None:
        assert detail != "modules"
        self.detail = detail
        self._path = folder / f"profile-{rank:05d}.json"
        self._first_step = first_step
        self._profiler: profile | None = None
        self._ahead_ns = 0

    def recording_begins(self, now_ns: int) -> None:
        """Start profiling."""
        activities = [ProfilerActivity.CPU]
        if self.detail == "kernels":
            activities.append(ProfilerActivity.CUDA)
        self._ahead_ns = _wall_clock_ahead_ns()
        self._profiler = profile(activities=activities, schedule=lambda _step: ProfilerAction.RECORD)
        self._profiler.start()

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        """Tell the profiler that a step has ended."""
        if recorded and self._profiler is not None:
            self._profiler.step()

    def end(self) -> None:
        """Stop profiling, and write the profile to a file until ``events`` reads it."""
        if self._profiler is not None:
            if self.detail == "kernels" and torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler = None

    def events(self) -> Events:
        """The profiled events: operators of the main thread, or all activity of the device.

        Raises UnsupportedError if kernels were requested and none were recorded.
        """
        from headway.interop.readers.foreign import Document
        from headway.interop.readers.kineto.companions import RankCompanions
        from headway.interop.readers.kineto.device import device_events
        from headway.interop.readers.kineto.document import DEVICE, no_collections, parse
        from headway.interop.readers.kineto.steps import steps_of

        try:
            with no_collections():
                document = parse(Document(self._path.name, self._path.read_bytes()))
        finally:
            self._path.unlink(missing_ok=True)
        steps = steps_of(document)
        if self.detail == "kernels":
            if not len(document.of_category(*DEVICE)):
                raise UnsupportedError(
                    "no kernels were recorded",
                    expected="a job on a device that torch.profiler can trace",
                    fix="Record a job on the CPU with --detail modules or operators.",
                )
            events, _ = device_events(document, steps, RankCompanions([], []))
        else:
            rows = document.of_category("cpu_op")
            rows = rows[document.threads(rows) == steps.main_thread]
            index = steps.of(document.start_ns[rows])
            rows, index = rows[index >= 0], index[index >= 0]
            events = Events.from_columns(
                kind=Kind.OPERATOR, stream=Stream.COMPUTE, name=document.name[rows], step=steps.number[index],
                start_ns=document.start_ns[rows], duration_ns=document.duration_ns[rows],
            )  # fmt: skip
        return self._on_own_clock(events)

    def _on_own_clock(self, events: Events) -> Events:
        enqueue_ns: Ints = np.where(events.enqueue_ns >= 0, events.enqueue_ns - self._ahead_ns, -1)
        columns = {
            name: getattr(events, name)
            for name in ("kind", "name", "stream", "group", "sequence", "size_bytes")
        }
        columns |= {name: getattr(events, name) for name in ("bucket", "peer", "algorithm", "duration_ns")}
        return Events.from_columns(
            **columns,
            step=events.step + self._first_step,
            start_ns=events.start_ns - self._ahead_ns,
            enqueue_ns=enqueue_ns,
        )


def _wall_clock_ahead_ns() -> int:
    """How far the profiler's clock (the wall clock) is ahead of the monotonic one, from the fastest of some readings."""
    looks = []
    for _ in range(_EXCHANGES):
        before_ns = time.monotonic_ns()
        wall_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        looks.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(looks)[1]
