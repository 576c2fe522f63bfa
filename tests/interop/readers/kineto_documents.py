"""Small Kineto documents made up for tests: what no recording of ours shows. None of them was written by PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headway.interop.readers.foreign import Document, ForeignRank
from headway.interop.readers.kineto.reader import read

Entry = dict[str, Any]
BASE_NS = 1_700_000_000_000_000_000


def span(cat: str, name: str, start_us: float, duration_us: float, *, tid: int = 1, **args: Any) -> Entry:
    """One event, on the thread ``tid``."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start_us, "dur": duration_us, "args": args,
    }  # fmt: skip


def step(number: int, start_us: float, duration_us: float) -> Entry:
    """What ``profiler.step()`` marks."""
    return span("user_annotation", f"ProfilerStep#{number}", start_us, duration_us)


def gloo(name: str, start_us: float, duration_us: float, call: int, *, numel: int = 64) -> list[Entry]:
    """A collective of Gloo: the call, and what a thread of Gloo annotates."""
    args: Entry = {"Input Dims": [[[numel]]], "Input type": ["TensorList"]}
    asked = {"Record function id": call, **args}
    return [
        span("cpu_op", f"c10d::{name}_", start_us, 5, **asked),
        span("user_annotation", f"gloo:{name}", start_us + 5, duration_us - 5, tid=2,
             **{"Record function id": call + 1, "Input Dims": [[numel]], "Input type": ["float"]}),
    ]  # fmt: skip


def job_events(steps: Sequence[int] = (1, 2, 3), shift_us: float = 0, late_us: float = 0) -> list[Entry]:
    """Steps of 10 ms: 4 ms of forward and input (``late_us``), 3 ms of backward, an all-reduce until 9 ms."""
    made = []
    for place, number in enumerate(steps):
        start_us = shift_us + 10_000 * place
        made += [
            step(number, start_us, 10_000),
            span("user_annotation", "enumerate(DataLoader)#_Iter.__next__", start_us, late_us),
            span("cpu_op", "aten::linear", start_us + late_us, 4_000 - late_us),
            span("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", start_us + 4_000, 3_000),
            *gloo("allreduce", start_us + 7_000, 2_000, 10 * number),
        ]
    return made


def document(events: Sequence[Entry], *, rank: int | None = None, world: int = 2, **head: Any) -> bytes:
    """A document of ``events``; ``rank`` of None leaves out who recorded it. A key of None is left out too."""
    whole: Entry = {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, "host_name": "host0", **head}
    if rank is not None:
        whole["distributedInfo"] = {
            "backend": "gloo",
            "rank": rank,
            "world_size": world,
            **whole.pop("distributed", {}),
        }
    whole["traceEvents"] = list(events)
    return json.dumps({key: value for key, value in whole.items() if value is not None}).encode()


def launched(
    name: str, asked_us: float, start_us: float, duration_us: float, number: int, **more: Any
) -> list[Entry]:
    """A kernel and the call that launched it, joined by ``number``; ``tid`` is the caller's thread."""
    tid = more.pop("tid", 1)
    return [
        span("cuda_runtime", "cudaLaunchKernel", asked_us, 2, tid=tid, correlation=number),
        span("kernel", name, start_us, duration_us, tid=77, correlation=number, stream=7, **more),
    ]


def read_document(events: Sequence[Entry], *, lenient: bool = False, **head: Any) -> ForeignRank:
    """The rank that a document of ``events`` is read as."""
    name = head.pop("name", "rank0.json")
    (found,) = read(Document(name, document(events, **head), lenient=lenient)).ranks
    return found
