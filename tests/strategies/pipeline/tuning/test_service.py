"""A tuner's process: it never holds up training, and ends with who asks it; so do the threads of a step's watch."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import psutil
from tests import limits

from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import _Arrivals
from headway.strategies.pipeline.tuning.follower import UNSENT, TunerProcess
from headway.strategies.pipeline.tuning.tuner import Tuner, candidates_of

ROWS = [[0] * 500] * 2  # of which a pipe takes some tens
STRATEGY = PipelineStrategy(order="kfkb", group_sizes=(2,), micro_batches=4)


def test_a_stopped_tuner_does_not_stop_training_and_ends_with_its_pipeline() -> None:
    threads, before = threading.active_count(), set(psutil.Process().children())
    asked = TunerProcess(Tuner(candidates_of(STRATEGY), (8,)))
    (tuner,) = set(psutil.Process().children()) - before
    os.kill(tuner.pid, signal.SIGSTOP)
    for _ in range(3 * UNSENT):
        asked.tell(ROWS)
    assert asked.decisions() == []
    assert asked.is_alive
    del asked
    gc.collect()
    assert not tuner.is_running()
    assert _come_down_to(threads)


def test_threads_that_wait_for_messages_end_with_the_watch() -> None:
    threads = threading.active_count()
    arrivals = _Arrivals()
    assert arrivals.of([]).result() > 0
    del arrivals
    gc.collect()
    assert _come_down_to(threads)


def _come_down_to(threads: int) -> bool:
    limit = limits.Limit(20.0)
    while threading.active_count() > threads and not limit.over():
        time.sleep(0.01)
    return threading.active_count() <= threads
