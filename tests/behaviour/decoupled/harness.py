"""Runs many cases one after another in one launch of ranks, each checked against its run in a single process.

A case that raises on one rank, or hangs, is reported by itself: the ranks then form a new process group and go on with
the next case; where that is impossible, the cases that are left get a new launch.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import limits, workers
from tests.behaviour.decoupled.job import ALONE, CASES, CPU, DDP, Case, Job
from torch.distributed import FileStore  # type: ignore[attr-defined]

GROUP_TIMEOUT_S = 30.0
CASE_LIMIT_S = 75.0  # a rank that is still at one case then is ended, with a traceback of its threads
ALL_LIMIT_S = 240.0

Seen = dict[str, "torch.Tensor | None"]


def names_of(mode: str, world_size: int, device: str = CPU) -> list[str]:
    """The registered cases that can be run in ``mode`` on ``world_size`` ranks, with tensors on ``device``."""
    return [
        case.name
        for case in CASES.values()
        if mode in case.only_in
        and mode not in case.not_in
        and (not case.world_sizes or world_size in case.world_sizes)
        and device in case.devices
    ]


# In the process of the test ----------------------------------------------------------------------------


@lru_cache
def problems(
    modules: tuple[str, ...],
    mode: str,
    world_size: int,
    folder: Path | None = None,
    device: str = CPU,
    backend: str = "gloo",
    names: tuple[str, ...] | None = None,
) -> dict[str, str]:
    """Run every case of ``modules``, or ``names``; return what is wrong with each, which is nothing where all is well.

    Cases may leave files for each other in ``folder``. All ranks share one ``device``.
    """
    found: dict[str, str] = {}
    left = names_of(mode, world_size, device) if names is None else list(names)
    deadline = time.monotonic() + limits.stretched(ALL_LIMIT_S)
    while left and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as reports:
            output = ""
            try:
                ended = workers.launch(
                    world_size, f"{__name__}:run_cases", modules, mode, left, reports, str(folder or reports), device,
                    timeout_s=deadline - time.monotonic(), group_timeout_s=GROUP_TIMEOUT_S, backend=backend,
                    bare=True,
                )  # fmt: skip
                output = "\n".join(f"rank {w.rank} ({w.status}):\n{w.output}" for w in ended if w.status)
            except AssertionError as error:
                output = str(error)
            done = _reports(Path(reports), world_size)
        found.update(done)
        left = [name for name in left if name not in done]
        if left:  # the first of them is what ended the ranks
            found[left.pop(0)] = f"did not come to its end:\n{output}"
    return {**dict.fromkeys(left, "was not reached"), **found}


def _reports(folder: Path, world_size: int) -> dict[str, str]:
    by_rank: list[dict[str, str]] = []
    for rank in range(world_size):
        file = folder / f"report-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        by_rank.append(dict(json.loads(line) for line in lines))
    reported = [name for name in by_rank[0] if all(name in reports for reports in by_rank)]
    return {
        name: "\n".join(
            f"rank {rank}: {reports[name]}" for rank, reports in enumerate(by_rank) if reports[name]
        )
        for name in reported
    }


# In the processes of the ranks -------------------------------------------------------------------------


def run_cases(
    rank: int,
    world_size: int,
    modules: list[str],
    mode: str,
    names: list[str],
    reports: str,
    folder: str,
    device: str,
) -> None:
    """Run the named cases, and write a line for each to this rank's report."""
    if device != CPU:
        torch.set_default_device(device)
    backend = dist.get_backend_config()
    for module in modules:
        importlib.import_module(module)
    references = _references(rank, world_size, names)
    if mode != DDP:
        importlib.import_module("headway.strategies.decoupled.wrapper")
    gc.collect()
    gc.freeze()  # what was imported need not be gone through again after every case
    with (Path(reports) / f"report-{rank}").open("w") as report:
        for index, name in enumerate(names):
            faulthandler.dump_traceback_later(limits.stretched(CASE_LIMIT_S), exit=True)
            started = time.monotonic()
            job = Job(mode, rank, world_size, Path(folder))
            problem = _run(CASES[name], job, references[name])
            del job
            if problem.startswith(_RAISED):
                _form_new_group(Path(reports) / f"store-{index}", rank, world_size, backend)
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            print(f"{name}: {time.monotonic() - started:.2f} s {problem[:300]}", flush=True)
            report.write(json.dumps([name, problem]) + "\n")
            report.flush()


_RAISED = "raised: "


def _references(rank: int, world_size: int, names: list[str]) -> dict[str, Seen | str]:
    """What every case must see. Each rank runs some of them, alone in its process, and all share the results."""
    mine: dict[str, Any] = {}
    for name in names[rank::world_size]:
        job = Job(ALONE, 0, world_size)
        try:
            CASES[name].script(job)
            job.finish()
            # As arrays, which are pickled fast.
            mine[name] = {what: None if v is None else v.numpy() for what, v in job.seen.items()}
        except Exception:
            mine[name] = traceback.format_exc()
    assert "headway" not in sys.modules, "the reference is not independent"
    parts: list[dict[str, Any]] = [{}] * world_size
    dist.all_gather_object(parts, mine)
    return {name: _as_tensors(seen) for part in parts for name, seen in part.items()}


def _as_tensors(seen: Any) -> Seen | str:
    if isinstance(seen, str):
        return seen
    return {
        what: None if value is None else torch.as_tensor(value, device=CPU) for what, value in seen.items()
    }


def _run(case: Case, job: Job, reference: Seen | str) -> str:
    if isinstance(reference, str):
        return f"the reference failed: {reference}"
    everybody: list[Any] = [None] * job.world_size
    try:
        case.script(job)
        job.finish()
        digest = job.digest()
        dist.all_gather_object(everybody, (set(job.seen), digest))  # also the barrier between cases
    except Exception:
        return _RAISED + traceback.format_exc()
    missing = set(reference).difference(*(seen for seen, _ in everybody))
    wrong = [_difference(what, value, reference, case.tolerance) for what, value in job.seen.items()]
    wrong += [f"{what} was seen on no rank" for what in sorted(missing)]
    if any(other != digest for _, other in everybody):
        wrong.append("parameters are not the same to the last bit on all ranks")
    return "; ".join([line for line in wrong if line][:5])


def _difference(what: str, value: torch.Tensor | None, reference: Seen, tolerance: float) -> str:
    if what not in reference:
        return f"{what} does not exist in the reference"
    expected = reference[what]
    if value is None or expected is None:
        return "" if value is expected else f"{what} is {_kind(value)}, expected {_kind(expected)}"
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"{what} is {_kind(value)}, expected {_kind(expected)}"
    if torch.allclose(value.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"{what} differs by {(value.double() - expected.double()).abs().max().item():.3g}"


def _kind(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{tuple(value.shape)} of {value.dtype}"


def _form_new_group(path: Path, rank: int, world_size: int, backend: str) -> None:
    """Leave a process group that may be in any state, which wakes those who wait for this rank, and form another."""
    try:
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
    store = FileStore(str(path), world_size)
    store.set(f"left-{rank}", "")
    timeout = timedelta(seconds=limits.stretched(GROUP_TIMEOUT_S))
    store.wait([f"left-{other}" for other in range(world_size)], 2 * timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
