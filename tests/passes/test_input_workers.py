"""Loaders with workers: what is predicted of them from measurements, and what they do live."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.passes.jobs import DDP, MS, job
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from headway.errors import UnsupportedError
from headway.graph.computation import Item, Part, Timeline
from headway.job import Job, MeasuredEffect
from headway.model import PassMemory
from headway.passes import input_workers
from headway.passes.base import with_timelines
from headway.passes.input_workers import InputWorkers
from headway.simulator.simulate import simulate

TWO = InputWorkers(workers=2)
WAIT_MS = 50


def measured(of_input: float, of_rest: float) -> Job:
    """A job that waits for input at the begin of each step."""

    def waiting(timeline: Timeline) -> Timeline:
        return replace(timeline, items=(Item(Part.INPUT, "", WAIT_MS * MS), *timeline.items))

    factors = {Part.INPUT: of_input, Part.FORWARD: of_rest, Part.BACKWARD: of_rest}
    effects = {TWO.effect_name(part): MeasuredEffect(factor) for part, factor in factors.items()}
    plain = job(nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)))
    return replace(with_timelines(plain, waiting), measured=effects)


@pytest.mark.parametrize(("of_input", "of_rest", "changed_ms"), [(0.1, 1.0, -45), (0.5, 1.25, 35)])
def test_the_step_changes_as_was_measured(of_input: float, of_rest: float, changed_ms: float) -> None:
    """Shorter where the waits end, and longer where workers take what the rank computes on."""
    plain = measured(of_input, of_rest)
    difference_ms = simulate(TWO.rewrite(plain), DDP).step_ms - simulate(plain, DDP).step_ms
    assert difference_ms == pytest.approx(changed_ms, abs=1)
    assert InputWorkers.proposed(plain) == (TWO,)


def test_memory_stays_what_passes_before_have_made_it() -> None:
    plain = measured(0.1, 1.0)
    watched = {name: replace(one, memory=plain.model.pass_memory) for name, one in plain.measured.items()}
    smaller = plain.model.model_copy(update={"pass_memory": PassMemory(forward_bytes=7, backward=())})
    rewritten = TWO.rewrite(replace(plain, measured=watched, stages=(smaller,)))
    assert rewritten.model.pass_memory == smaller.pass_memory


def test_what_was_not_measured_is_refused_and_not_proposed() -> None:
    plain = replace(measured(1, 1), measured={})
    with pytest.raises(
        UnsupportedError, match=r"2 loader workers.*not measured.*headway measure input TRACE 'workers=2'"
    ):
        TWO.rewrite(plain)
    assert InputWorkers.proposed(plain) == ()


@pytest.mark.parametrize(
    "options", [{}, {"workers": 0}, {"workers": 1, "prefetch": 0}, {"workers": 2, "pin": 1}]
)
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        InputWorkers.model_validate(options)


class Numbers(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Nested(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(sum(int(each.sum()) for each, _ in DataLoader(Numbers(), batch_size=4))), os.getpid()


@pytest.fixture
def loaders() -> Iterator[None]:
    original: Any = DataLoader.__iter__
    yield
    DataLoader.__iter__ = original  # type: ignore[method-assign]
    input_workers._worker_settings = None


@pytest.mark.usefixtures("loaders")
def test_workers_load_the_same_samples_in_the_same_order() -> None:
    model, loader = nn.Linear(2, 2), DataLoader(Numbers(), batch_size=3)
    assert InputWorkers(workers=1).apply(model, None) is model
    InputWorkers(workers=2, prefetch=3).apply(model, None)
    for _ in range(2):
        found = list(loader)
        assert torch.cat([index for index, _ in found]).tolist() == list(range(12))
        processes = {int(each) for _, own in found for each in own}
        assert len(processes) == 2
        assert os.getpid() not in processes
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)
    assert [int(value) for value, _ in DataLoader(Nested(), batch_size=None)] == [66] * 12


@pytest.mark.usefixtures("loaders")
def test_other_loaders_stay_as_they_are() -> None:
    TWO.apply(nn.Linear(2, 2), None)
    stream, own = DataLoader(Stream(), batch_size=None), DataLoader(Numbers(), num_workers=1)
    evaluated = DataLoader(Numbers())
    assert list(stream) == [0, 1, 2]
    assert len(list(own)) == 12
    with torch.no_grad():
        assert len(list(evaluated)) == 12
    assert [each.num_workers for each in (stream, own, evaluated)] == [0, 1, 0]


def test_it_needs_a_permission_and_says_what_it_changes() -> None:
    assert TWO.permission == "randomness"
    assert "different random numbers" in TWO.changes_training
