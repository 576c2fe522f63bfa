"""Recorded and made-up MXNet profiles for the tests of reading them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from headway.interop.readers.foreign import Document, ForeignRank
from headway.trace.events import Events, Kind
from headway_readers import mxnet

FIXTURES = (
    Path(__file__).parent / "fixtures" / "mxnet"
)  # see make.py there for the jobs that these facts are of


BEGIN_US = 1_790_000_000_000_000


def fixture(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def rank_of(
    data: bytes, name: str = "worker3.json", *, lenient: bool = False, ending: str = ""
) -> ForeignRank:
    reading = mxnet.read(Document(name, data, ending, lenient))
    assert not reading.companions
    (found,) = reading.ranks
    check_columns(found.events)
    return found


def check_columns(events: Events) -> None:
    assert (events.duration_ns >= 0).all()
    assert (np.diff(events.start_ns) >= 0).all()
    steps = events.of_kind(Kind.STEP)
    assert (steps.end_ns[:-1] <= steps.start_ns[1:]).all()
    assert steps.step.tolist() == list(range(len(steps)))
    waits = events.of_kind(Kind.WAIT)
    assert set(waits.step.tolist()) <= set(steps.step.tolist())
    for one in steps:
        own = waits.of_step(one.step)
        assert not len(own) or one.start_ns <= own.start_ns.min() <= own.end_ns.max() <= one.end_ns


def a_step(events: Events) -> Counter[str]:
    counts = {tuple(sorted(Counter(events.of_step(step).kind.tolist()).items()))
              for step in events.of_kind(Kind.STEP).step.tolist()}  # fmt: skip
    assert counts, "steps"
    return Counter(dict(min(counts)))


def spans(
    *rows: tuple[str, float, float], process: str = "cpu/0", begin: str = "B", end: str = "E"
) -> list[Any]:
    """Pairs of events, from names, starts and durations in milliseconds."""
    events: list[Any] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": process}}]
    for name, start_ms, duration_ms in rows:
        common = {
            "name": name,
            "cat": "operator" if process == "cpu/0" else process,
            "pid": process,
            "tid": 7,
        }
        events.append({**common, "ph": begin, "ts": BEGIN_US + round(start_ms * 1000)})
        events.append({**common, "ph": end, "ts": BEGIN_US + round((start_ms + duration_ms) * 1000)})
    return events


def profile(*events: list[Any]) -> bytes:
    return json.dumps({"traceEvents": [event for part in events for event in part]}).encode()


FORWARD, PUSH = ("FullyConnected", 0.0, 1.0), ("KVStoreDistDefaultStoragePushPull", 2.0, 3.0)
