"""Channels: jobs in order on threads, and what is left of those when a job has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.collectives import executor
from headway.compression.cast import Cast
from headway.errors import CommunicationError, InternalError
from headway.plugins import PluginFaultError
from headway.strategies.live.channels import communication
from headway.strategies.live.channels.communication import Channels, Job, own_work
from headway.strategies.live.channels.streams import Streams
from headway.strategies.live.channels.wiring import OwnGroups

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[Channels]:
    """Two channels of a job of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    executor.compiled.cache_clear()
    try:
        groups = OwnGroups(host=(dist.new_group(), dist.new_group()))
        yield Channels(groups, _culprit, Streams(torch.device("cpu")), "ours")
    finally:
        dist.destroy_process_group()


def _culprit(own: str) -> str:
    return own or "rank 7 has ended"


def _fail(_: int) -> None:
    raise RuntimeError("connection reset")


def test_threads_have_ended_when_channels_stop_after_a_failure(channels: Channels) -> None:
    started = threading.Event()

    def slow(_: int) -> None:
        started.set()
        time.sleep(0.3)

    slowly = channels.submit(Job("all_reduce", 0, 4, slow))
    assert started.wait(10)
    failed = channels.submit(Job("all_reduce", 1, 4, _fail))
    with pytest.raises(CommunicationError, match="rank 7 has ended"):
        channels.wait(failed)
    channels.stop()
    assert slowly.done.is_set()
    assert not any(thread.is_alive() for thread in channels._threads)


def test_a_thread_that_does_not_end_is_not_waited_for_for_ever(
    channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "FAILED_JOIN_S", 0.1)
    started, may_end = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        started.set()
        may_end.wait(30)

    stuck = channels.submit(Job("all_reduce", 0, 4, hang))
    assert started.wait(10)
    failed = channels.submit(Job("all_reduce", 1, 4, _fail))
    with pytest.raises(CommunicationError):
        channels.wait(failed)
    channels.stop()
    assert not stuck.done.is_set()
    may_end.set()
    stuck.done.wait(10)


def test_jobs_after_a_failed_one_fail_without_running(channels: Channels) -> None:
    with pytest.raises(CommunicationError):
        channels.wait(channels.submit(Job("all_reduce", 0, 4, _fail)))
    ran = threading.Event()
    later = channels.submit(Job("all_reduce", 1, 4, lambda _: ran.set()))
    with pytest.raises(CommunicationError, match="bucket 0"):
        channels.wait(later)
    assert not ran.is_set()
    channels.stop()


def _divide(_: int) -> None:
    print(1 // 0)


def _clash(_: int) -> None:
    with own_work():
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize(("work", "said"), [(_divide, "ZeroDivisionError"), (_clash, "RuntimeError")])
def test_what_is_no_failure_of_communication_is_not_called_one(
    channels: Channels, work: Callable[[int], None], said: str
) -> None:
    with pytest.raises(InternalError, match=rf"rank 0: .* internal error, .*: {said}: ") as raised:
        channels.wait(channels.submit(Job("all_gather", 3, 4, work)))
    assert type(raised.value.__cause__).__name__ == said
    assert "rank 7" not in str(raised.value)
    with pytest.raises(InternalError, match="bucket 3"):
        channels.wait(channels.submit(Job("all_reduce", 4, 4, work)))
    channels.stop()


def _foreign(_: int) -> None:
    with own_work():
        raise PluginFaultError("codec", Cast(dtype="bfloat16"), "the mean has 2 elements, expected 3")


def test_a_codec_of_another_package_is_blamed_by_name(channels: Channels) -> None:
    with pytest.raises(InternalError) as raised:
        channels.wait(channels.submit(Job("all_reduce", 3, 4, _foreign)))
    said = str(raised.value)
    assert said.startswith(
        "rank 0: the codec cast of headway.compression.cast cannot be used: the mean has 2 "
    )
    assert "Report it" not in said
    channels.stop()


def test_the_loop_of_collectives_is_compiled_before_threads_can_need_it(channels: Channels) -> None:
    assert executor.compiled.cache_info().currsize == 1
    channels.stop()


def test_work_is_done_while_collectives_have_all_channels(channels: Channels) -> None:
    may_end = threading.Event()

    def hold(_: int) -> None:
        may_end.wait(30)

    busy = [channels.submit(Job("all_gather", number, 4, hold)) for number in range(2)]
    done: list[str] = []
    first = channels.submit_work(Job("update", 0, 4, lambda _: done.append("first")))
    second = channels.submit_work(Job("update", 1, 4, lambda _: done.append("second")))
    behind = channels.submit(Job("all_gather", 2, 4, lambda _: done.append("gather"), after=[second]))
    assert second.done.wait(10)
    assert first.done.is_set()
    assert done == ["first", "second"]
    assert not any(each.done.is_set() for each in (*busy, behind))
    may_end.set()
    channels.wait(behind)
    channels.stop()
    assert not any(thread.is_alive() for thread in channels._threads)


def test_a_collective_behind_work_that_failed_fails_without_running(channels: Channels) -> None:
    ran = threading.Event()
    failed = channels.submit_work(Job("update", 3, 4, _divide))
    with pytest.raises(InternalError, match=r"the update of bucket 3 .* ZeroDivisionError"):
        channels.wait(channels.submit(Job("all_gather", 3, 4, lambda _: ran.set(), after=[failed])))
    assert not ran.is_set()
    channels.stop()
