"""What rank 0 under a plan reports of its steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.integrations import planned, reports
from headway.integrations.planned import StepMeter
from headway.integrations.reports import Report, read_reports
from headway.integrations.short_runs import WARM_UP_STEPS
from headway.torch_private.optimizers import StepHook, after_every_step


class Job:
    """Models whose optimizers step at moments that a test says, and what was reported of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_ns = 10**12
        self.models = [nn.Linear(2, 2) for _ in range(2)]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in self.models]

    def step(self, *lengths_ms: float, model: int = 0) -> None:
        for length_ms in lengths_ms:
            self.now_ns += round(length_ms * 1e6)
            self._optimizers[model].step()

    def report(self) -> Report:
        (found,) = read_reports(self.folder)
        return found


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(tmp_path)
    monkeypatch.setenv(reports.REPORTS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(reports, "_report", {})
    monkeypatch.setattr("headway.integrations.planned.time.monotonic_ns", lambda: made.now_ns)
    hooks: list[StepHook] = []
    monkeypatch.setattr(planned, "after_every_step", lambda call: hooks.append(after_every_step(call)))
    monkeypatch.setattr("headway.integrations.planned.atexit.register", lambda call: None)
    yield made
    for hook in hooks:
        hook.remove()


def test_steps_are_timed_without_warm_up_and_pauses(job: Job) -> None:
    meter = StepMeter(with_pauses=False)
    meter.attach()
    assert job.report().began_s > 0
    job.step(*[500.0] * WARM_UP_STEPS, *[8.0, 12.0] * 50, 900.0, *[8.0, 12.0] * 50)
    meter.tell()
    found = job.report()
    assert (found.steps, found.timed_steps) == (WARM_UP_STEPS + 201, 200)
    assert found.step_ms == pytest.approx(10.0)
    assert found.spread_ms == pytest.approx(2.0)


def test_long_steps_of_the_strategy_count(job: Job) -> None:
    meter = StepMeter(with_pauses=True)
    meter.attach()
    job.step(*[1.0] * WARM_UP_STEPS, *[10.0, 10.0, 10.0, 70.0] * 5)
    meter.tell()
    assert job.report().step_ms == pytest.approx(25.0)


def test_the_last_steps_count_and_are_told_while_the_job_runs(job: Job) -> None:
    StepMeter(with_pauses=False).attach()
    told = []
    for _ in range(4000):
        job.step(10.0)
        told.append(job.report().steps)
    assert told[:9] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
    tellings = len(list(itertools.groupby(told)))
    assert tellings < 20, "neither each step nor each second"
    assert job.report().timed_steps == planned.TIMED_STEPS


def test_of_several_models_the_plans_own_counts(job: Job) -> None:
    meter = StepMeter(with_pauses=False)
    meter.attach()
    meter.model_is(job.models[1])
    for _ in range(20):
        job.step(5.0)
        job.step(5.0, model=1)
    meter.tell()
    assert job.report().steps == 20
    assert job.report().step_ms == pytest.approx(10.0)


def test_a_job_without_steps_says_none(job: Job) -> None:
    meter = StepMeter(with_pauses=False)
    meter.attach()
    meter.tell()
    assert job.report().steps == 0
