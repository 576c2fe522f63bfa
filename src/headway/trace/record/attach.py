"""Where recording begins: at the job's first process group, or where code asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from headway import files
from headway.errors import LaunchError, TraceError
from headway.strategies.data_parallel.decoupled import observer
from headway.strategies.data_parallel.decoupled.runtime import DecoupledDataParallel
from headway.trace.events import Kind
from headway.trace.record.derive import StrategySpan
from headway.trace.record.finish import finish_recording
from headway.trace.record.recorder import Recorder, RecordOptions


class _RuntimeObserver(observer.Observer):
    """Hands what a strategy's runtime reports of itself to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collective(
        self,
        name: str,
        bucket: int,
        size_bytes: int,
        enqueue_ns: int,
        start_ns: int,
        end_ns: int,
        sequence: int,
    ) -> None:
        self._recorder.span(
            StrategySpan(Kind.COLLECTIVE, name, bucket, start_ns, end_ns, size_bytes, enqueue_ns, sequence)
        )

    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        self._recorder.span(StrategySpan(Kind.WAIT, name, bucket, start_ns, end_ns))

    def update(self, bucket: int, start_ns: int, end_ns: int) -> None:
        self._recorder.span(StrategySpan(Kind.UPDATE, f"bucket {bucket}", bucket, start_ns, end_ns))


def record_from_first_group(options: RecordOptions) -> Recorder:
    """Record this process from the moment its script initialises the default process group."""
    recorder = Recorder(options)
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not recorder.finished and dist.is_initialized() and dist.init_process_group is init_process_group:
            dist.init_process_group = original
            dist.distributed_c10d.init_process_group = original
            _attach(recorder)
        return result

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
    return recorder


def _attach(recorder: Recorder) -> None:
    observer.set_observer(_RuntimeObserver(recorder))
    _watch_constructions(DistributedDataParallel, recorder)
    _watch_constructions(DecoupledDataParallel, recorder)
    _finish_before_the_group_goes(recorder)
    recorder.attach()


def _finish_before_the_group_goes(recorder: Recorder) -> None:
    """End a recording whose job ends early while its process group still stands."""
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        recorder.finish()
        return original(*args, **kwargs)

    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group


def _watch_constructions(wrapper: type, recorder: Recorder) -> None:
    original: Callable[..., None] = wrapper.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        recorder.watch(self, self.module)

    wrapper.__init__ = construct  # type: ignore[misc]


@contextmanager
def record(
    folder: str | Path, model: Any = None, *, first_step: int = 5, last_step: int = 25
) -> Iterator[Recorder]:
    """Record the optimizer steps ``first_step`` to ``last_step - 1`` that run inside the block, as a trace.

    Every rank enters the block, after ``init_process_group``, with the same ``folder`` on a file system that all
    ranks see. ``model`` is the wrapped model, where it was wrapped before the block. Rank 0 assembles the trace
    when the block ends.

    Raises LaunchError without a process group, TraceError where the folder exists or the block ends before
    ``first_step`` steps.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "nothing to record yet", expected="a process group", fix="Call init_process_group first."
        )
    out = Path(folder)
    staging = out.parent / f".{out.name}.recording"
    if dist.get_rank() == 0:
        files.check_absent(out, TraceError)
        staging.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    recorder = Recorder(RecordOptions(folder=staging, first_step=first_step, last_step=last_step))
    _attach(recorder)
    if model is not None:
        recorder.watch(model, model.module)
    try:
        yield recorder
    finally:
        recorder.finish()
    if dist.get_rank() == 0:
        finish_recording(staging, out, dist.get_world_size())
