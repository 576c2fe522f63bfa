"""Waits and pauses of the thread that watches, told of as they end; nothing is left behind."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headway.recording import watches
from headway.recording.watches import CHECKPOINT, COLLECTION, PauseWatch
from headway.trace.events import Kind

pytestmark = pytest.mark.timeout(60)

Told = list[tuple[str, str, int, int]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """What the watch told of; the shortest counts too. Nothing is collected but by the tests."""
    monkeypatch.setattr(watches, "LEAST_NS", 0)
    gc.disable()
    yield []
    gc.enable()


@pytest.fixture
def watch(told: Told) -> Iterator[PauseWatch]:
    made = PauseWatch(lambda *row: told.append(row))
    made.attach()
    yield made
    made.detach()


def real_work() -> dist.Work:
    """A work of a real process group, of this process alone."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))  # type: ignore[attr-defined]
    work: dist.Work = group.allreduce([torch.ones(4)])
    return work


def names(told: Told) -> list[tuple[str, str]]:
    assert all(start_ns <= end_ns for *_, start_ns, end_ns in told)
    return [(kind, name) for kind, name, *_ in told]


def test_the_wait_of_a_work_is_a_wait(watch: PauseWatch, told: Told) -> None:
    work = real_work()
    begin_ns = time.monotonic_ns()
    assert work.wait() is True
    end_ns = time.monotonic_ns()
    assert names(told) == [(Kind.WAIT, "work")]
    assert begin_ns <= told[0][2] <= told[0][3] <= end_ns


def test_a_garbage_collection_is_a_pause(watch: PauseWatch, told: Told) -> None:
    gc.collect()
    assert names(told) == [(Kind.PAUSE, COLLECTION)]


def test_saving_is_a_pause_and_saves(watch: PauseWatch, told: Told) -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3)}, file, _use_new_zipfile_serialization=True)
    file.seek(0)
    assert torch.load(file)["a"].tolist() == [0, 1, 2]
    assert names(told) == [(Kind.PAUSE, CHECKPOINT)]


def test_what_is_short_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "LEAST_NS", 60 * 10**9)
    told: Told = []
    watch = PauseWatch(lambda *row: told.append(row))
    watch.attach()
    gc.collect()
    watch.detach()
    assert told == []


def test_errors_pass_through_and_their_time_counts(watch: PauseWatch, told: Told) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save(lambda: None, io.BytesIO())
    with pytest.raises(TypeError):
        real_work().wait("no time")  # type: ignore[arg-type]
    assert names(told) == [(Kind.PAUSE, CHECKPOINT), (Kind.WAIT, "work")]


def test_other_threads_are_not_told(watch: PauseWatch, told: Told) -> None:
    def work() -> None:
        gc.collect()
        torch.save(1, io.BytesIO())
        real_work().wait()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert told == []
    gc.collect()
    assert names(told) == [(Kind.PAUSE, COLLECTION)]


def patched() -> list[Any]:
    """Everything that a watch lays itself over."""
    return [vars(dist.Work)["wait"], torch.save, *gc.callbacks]


def test_nothing_is_left_after_detach(told: Told) -> None:
    before = patched()
    watch = PauseWatch(lambda *row: told.append(row))
    for _ in range(2):
        watch.attach()
        assert patched() != before
        watch.detach()
        assert patched() == before
        assert all(one is other for one, other in zip(patched(), before, strict=True))
    watch.detach()
    assert real_work().wait() is True
    assert told == []


def test_patched_functions_keep_their_names(watch: PauseWatch) -> None:
    assert torch.save.__name__ == "save"
    assert "Saves an object" in (torch.save.__doc__ or "")
    assert dist.Work.wait.__name__ == "wait"


def test_the_patch_of_a_job_stays_and_ours_falls_silent(told: Told) -> None:
    original = vars(dist.Work)["wait"]
    watch = PauseWatch(lambda *row: told.append(row))
    calls = []
    watch.attach()
    beneath = dist.Work.wait

    def of_the_job(work: dist.Work, *arguments: Any) -> bool:
        calls.append(work)
        return bool(beneath(work, *arguments))

    try:
        dist.Work.wait = of_the_job  # type: ignore[method-assign, assignment]
        real_work().wait()
        assert (len(calls), len(told)) == (1, 1)
        watch.detach()
        assert vars(dist.Work)["wait"] is of_the_job
        real_work().wait()
        assert (len(calls), len(told)) == (2, 1)
        watch.attach()  # as a recording that is resumed
        real_work().wait()
        assert (len(calls), len(told)) == (3, 2)
        watch.detach()
        assert vars(dist.Work)["wait"] is of_the_job
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]
