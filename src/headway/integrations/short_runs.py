"""Runs a user's command for a given number of steps, and times them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from headway import files
from headway.errors import LaunchError, one_line
from headway.integrations.launch import (
    CommandOutcome,
    injected_environment,
    run_command,
    spreads,
    starts_all_here,
    stated_world_size,
)

WARM_UP_STEPS = 5  # as of a recording: DDP rebuilds its buckets after the first
LEAST_STEPS = 3
BEGINNING_S = 900.0  # for a command to get as far as its first step
SLOWEST = 10.0
MAX_TAIL_BYTES = 8192


class TimeOptions(BaseModel):
    """Options for timing a rank: ``steps`` steps after ``warm_up`` others, written into ``folder``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    warm_up: int = Field(ge=1)
    steps: int = Field(ge=1)


@dataclass(frozen=True, slots=True)
class ShortRun:
    """The timed steps of a run, in ms, each as the mean over ranks.

    ``went_on`` says that the command did not exit when told to, but trained to its end.
    """

    steps_ms: tuple[float, ...]
    went_on: bool = False


def steps_file(folder: Path, rank: int) -> Path:
    """The file with the end times of a rank's timed steps, in ns."""
    return folder / f"steps-{rank:05d}.json"


def check_command(command: Sequence[str], world_size: int) -> None:
    """Raise LaunchError if ``command`` visibly starts another number of ranks, or only a part of them."""
    stated = stated_world_size(command, os.environ)
    if stated not in (None, world_size):
        raise LaunchError(
            "the command starts another number of workers than the recorded job", got=f"{stated} workers",
            expected=f"{world_size}", fix="Measure with the command that was recorded.",
        )  # fmt: skip
    if not spreads(command) and not starts_all_here(command, os.environ):
        raise LaunchError(
            "measuring plans needs one command that starts all ranks", got="one of several launchers",
            expected="torchrun on one host, or srun and the like around it",
            fix="Run headway run --plan on all hosts, under one plan after the other.",
        )  # fmt: skip


class ShortRuns:
    """Runs ``command`` of ``world_size`` ranks repeatedly, in subfolders of ``folder``, which all ranks must see.

    A run times out after ``BEGINNING_S`` plus ``SLOWEST`` times the duration of its steps at ``step_ms`` each.
    """

    def __init__(self, command: Sequence[str], folder: Path, world_size: int, step_ms: float) -> None:
        self._command, self._folder, self._world_size = command, folder, world_size
        self._step_ms = step_ms
        self._count = 0

    def run(self, plan_path: Path | None, steps: int) -> ShortRun:
        """Run the command, under a plan if there is one, until ``steps`` steps are timed.

        Raises LaunchError if the command fails, refuses the plan or makes too few steps, and KeyboardInterrupt if
        Headway is interrupted.
        """
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        reports = folder / "reports"
        reports.mkdir(parents=True)
        options = TimeOptions(folder=folder, warm_up=WARM_UP_STEPS, steps=steps)
        environment = injected_environment(
            os.environ, plan=None if plan_path is None else str(plan_path), time=options.model_dump_json()
        )
        log = folder / "output"
        most_s = BEGINNING_S + SLOWEST * (WARM_UP_STEPS + steps) * self._step_ms / 1e3
        try:
            with log.open("wb") as output:
                ended = run_command(
                    self._command, environment, reports, output=output, leaving=True, most_s=most_s
                )
            if ended.interrupted_by:
                raise KeyboardInterrupt
            if ended.out_of_time:
                raise LaunchError(
                    "the command timed out", got=f"no {steps} steps in {most_s:.0f} s",
                    expected=f"steps of about {self._step_ms:.4g} ms, as recorded",
                    fix="Try it with headway run.",
                )  # fmt: skip
            self._check(ended, log, plan_path is not None)
            return ShortRun(self._steps_ms(folder), any(report.went_on for report in ended.reports))
        finally:
            files.remove_folder(folder)

    def _check(self, ended: CommandOutcome, log: Path, planned: bool) -> None:
        ranks = [report for report in ended.reports if report.rank >= 0]
        done = sum(report.done for report in ranks)
        # The exit status of a command that was told to leave and went on does not matter.
        if done < self._world_size or (ended.status and not any(report.left for report in ranks)):
            status = f"status {ended.status}: {_last_line(log)}" if ended.status else "status 0"
            raise LaunchError(
                "the command ended before all ranks finished their timed steps", got=status,
                expected=f"{self._world_size} ranks that train", fix="Try it with headway run.",
            )  # fmt: skip
        if planned and not any(report.applied for report in ranks):
            raise LaunchError(
                "the plan was not applied", got="a script that does not wrap the plan's model",
                expected="the command that was recorded",
            )  # fmt: skip

    def _steps_ms(self, folder: Path) -> tuple[float, ...]:
        ends_ns = [_read(steps_file(folder, rank)) for rank in range(self._world_size)]
        rank_steps_ms = [
            [(end - begin) / 1e6 for begin, end in pairwise(rank_ends_ns)] for rank_ends_ns in ends_ns
        ]
        count = min(map(len, rank_steps_ms))
        if count < LEAST_STEPS:
            raise LaunchError(
                "the command makes too few steps to time",
                got=f"{max(0, count)} after {WARM_UP_STEPS} warm-up steps",
                expected=f"at least {LEAST_STEPS}", fix="Train for more steps.",
            )  # fmt: skip
        return tuple(sum(steps[at] for steps in rank_steps_ms) / len(rank_steps_ms) for at in range(count))


def _read(path: Path) -> list[int]:
    times_ns = json.loads(files.read_text(path, LaunchError, "the steps of a rank"))
    assert isinstance(times_ns, list)
    return times_ns


def _last_line(log: Path) -> str:
    """The last line of a command's output that is not empty."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - MAX_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    return next((one_line(line) for line in reversed(lines) if line.strip()), "it printed nothing")
