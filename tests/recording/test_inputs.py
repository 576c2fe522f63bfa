"""Waits for batches and for workers that start; nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headway import torch_private
from headway.recording import inputs
from headway.recording.inputs import InputWatch

pytestmark = pytest.mark.timeout(60)

READ_S = 0.02
Told = list[tuple[int, int]]


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(READ_S)
        return torch.ones(2) * index


@pytest.fixture
def told() -> Iterator[Told]:
    found: Told = []
    watch = InputWatch(lambda *span: found.append(span), lambda: True)
    watch.attach()
    yield found
    watch.detach()


def test_each_batch_is_a_wait(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LEAST_LOOP_NS", 10**9)  # whatever this machine takes for the rest
    assert len(list(DataLoader(Slow(), batch_size=2))) == 2
    assert len(told) == 2
    assert all(end_ns - start_ns >= 2 * READ_S * 1e9 for start_ns, end_ns in told)


def test_workers_that_start_and_end_are_waited_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LEAST_LOOP_NS", 0)
    assert len(list(DataLoader(Slow(), batch_size=2, num_workers=1))) == 2
    assert len(told) == 4
    assert all(one[1] <= other[0] for one, other in pairwise(told))


def test_what_is_not_recorded_is_not_told() -> None:
    found: Told = []
    watch = InputWatch(lambda *span: found.append(span), lambda: False)
    watch.attach()
    list(DataLoader(Slow()))
    watch.detach()
    assert not found


def test_nothing_is_left() -> None:
    iterator = torch_private.data_loader_iterator()
    before = vars(iterator)["__next__"], vars(DataLoader)["__iter__"]
    watch = InputWatch(lambda *_: None, lambda: True)
    watch.attach()
    assert vars(DataLoader)["__iter__"] is not before[1]
    watch.detach()
    assert (vars(iterator)["__next__"], vars(DataLoader)["__iter__"]) == before
