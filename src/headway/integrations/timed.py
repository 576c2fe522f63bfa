"""Times the steps of a rank in a short run, and exits after the last one."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headway import files
from headway.integrations import reports
from headway.integrations.short_runs import TimeOptions, steps_file
from headway.recording.attach import watch_constructions
from headway.recording.step_clock import StepClock
from headway.torch_private.optimizers import after_every_step


def time_this_rank(options_json: str) -> None:
    """Time the steps of this rank, whose default process group is initialised, with ``TimeOptions`` as JSON."""
    timer = StepTimer(TimeOptions.model_validate_json(options_json), dist.get_rank())
    watch_constructions(timer)
    timer.attach()
    reports.update(records=True)


class StepTimer:
    """Records the end times of steps, counted as in a recording.

    After the last one, which is the same step on every rank, it raises SystemExit in ``optimizer.step()``: the script
    ends as if it had called ``sys.exit()`` there, so its clean-up runs, but not the code after training.
    """

    def __init__(self, options: TimeOptions, rank: int) -> None:
        self._options = options
        self._rank = rank
        self._process = os.getpid()
        self._clock = StepClock()
        self._roots: list[nn.Module] = []
        self._undo: list[Callable[[], None]] = []
        self._ends_ns: list[int] = []
        self._written = False

    def attach(self) -> None:
        """Begin."""
        after_every_step(self._stepped)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # such processes end without Python's exit handlers
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)

    def watch(self, _model: nn.Module, root: nn.Module) -> None:
        """Note that the script has wrapped the parameters of ``root``."""
        if any(root is known_root for known_root in self._roots):
            return
        (self._clock.another_is if self._roots else self._clock.model_is)(root)
        self._roots.append(root)

    def when_finished(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` after the last step."""
        self._undo.append(undo)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        now_ns = time.monotonic_ns()
        if os.getpid() != self._process:
            return
        if self._written:
            if not reports.reported("went_on"):
                reports.update(went_on=True)  # the script has caught SystemExit
            return
        if not self._clock.counts(optimizer):
            return
        self._ends_ns.append(now_ns)
        if len(self._ends_ns) == self._options.warm_up + self._options.steps:
            self._write()
            reports.update(left=True)
            raise SystemExit(0)

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:  # discard the steps of a script that failed
            self._write()

    def _write(self) -> None:
        """Write the times, once; there are fewer if the script ended early."""
        if self._written or os.getpid() != self._process:
            return
        self._written = True
        while self._undo:
            self._undo.pop()()
        self._clock.forget()
        self._roots.clear()
        ends_ns = self._ends_ns[self._options.warm_up - 1 :]
        files.write_text(steps_file(self._options.folder, self._rank), json.dumps(ends_ns))
        reports.update(done=True)
