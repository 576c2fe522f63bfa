"""Starts a recording: when the job creates its process group, or where the script calls ``record``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import files, torch_private
from headway.errors import LaunchError, TraceError, UserError
from headway.recording.derive import StrategySpan
from headway.recording.finish import finish_recording
from headway.recording.patching import guarded, report_fault
from headway.recording.profiled import Detail
from headway.recording.recorder import Recorder, RecordOptions
from headway.strategies.live.channels import observer
from headway.strategies.registry import ask
from headway.trace.events import Kind, Stream


class _RuntimeObserver(observer.Observer):
    """Passes the events that a strategy's runtime reports to a recorder."""

    wants_transfers = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @guarded
    def collective(self, done: observer.Collective) -> None:
        self._recorder.span(
            StrategySpan(
                Kind.COLLECTIVE, done.name, done.bucket, done.start_ns, done.end_ns,
                done.size_bytes, done.enqueue_ns, done.sequence, done.algorithm, transfers=done.transfers,
                strategy=done.strategy,
            )
        )  # fmt: skip

    @guarded
    def wait(self, name: str, bucket: int, start_ns: int, end_ns: int) -> None:
        self._recorder.span(StrategySpan(Kind.WAIT, name, bucket, start_ns, end_ns))

    @guarded
    def update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        self._recorder.span(StrategySpan(Kind.UPDATE, f"bucket {bucket}", bucket, start_ns, end_ns))

    @guarded
    def background_update(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        self._recorder.span(
            StrategySpan(
                Kind.UPDATE, f"bucket {bucket}", bucket, start_ns, end_ns, stream=Stream.COMMUNICATION
            )
        )


def record_this_rank(options: RecordOptions) -> Recorder:
    """Start recording this process. Its default process group must exist."""
    recorder = Recorder(options)
    _attach(recorder)
    return recorder


def _attach(recorder: Recorder) -> None:
    observer.set_observer(_RuntimeObserver(recorder))
    recorder.when_finished(lambda: observer.set_observer(None))
    watch_constructions(recorder)
    _watch_compiling(recorder)
    _finish_before_the_group_goes(recorder)
    recorder.attach()


class ModelWatcher(Protocol):
    """Is notified of every model that a script wraps, until it has finished."""

    def watch(self, model: nn.Module, root: nn.Module) -> None:
        """``model`` was constructed; it wraps ``root``, which holds the parameters."""

    def when_finished(self, undo: Callable[[], None]) -> None:
        """Register ``undo``, which is called once notifications are no longer needed."""


def watch_constructions(watcher: ModelWatcher) -> None:
    """Notify ``watcher`` of every model that is wrapped for data parallelism from now on, under any strategy."""
    _watch_constructions(DistributedDataParallel, watcher)
    for _, wrappers in ask(lambda plugin: plugin.wrappers()):
        for wrapper in wrappers:
            _watch_constructions(wrapper, watcher)


def _patch(watcher: ModelWatcher, owners: Sequence[Any], name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by ``wrapper`` until ``watcher`` has finished."""
    original = getattr(owners[0], name)
    patched = functools.wraps(original)(wrapper)
    for owner in owners:
        setattr(owner, name, patched)

    def undo() -> None:
        for owner in owners:
            if getattr(owner, name) is patched:
                setattr(owner, name, original)

    watcher.when_finished(undo)


def _finish_before_the_group_goes(recorder: Recorder) -> None:
    """Finish the recording of a job that ends early before its process group is destroyed."""
    original = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> Any:
        if group is None or group is dist.group.WORLD:
            recorder.finish()
        return original(group)

    _patch(recorder, (dist, dist.distributed_c10d), "destroy_process_group", destroy_process_group)


def _watch_constructions(wrapper: type, watcher: ModelWatcher) -> None:
    original: Callable[..., None] = wrapper.__init__  # type: ignore[misc]

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not getattr(self, "is_called", True):  # it is part of another wrapper
            return
        try:
            watcher.watch(self, self.module)
        except UserError:  # Headway refuses this model
            raise
        except Exception as failure:
            report_fault(failure)

    _patch(watcher, (wrapper,), "__init__", construct)


def _watch_compiling(recorder: Recorder) -> None:
    compile_code, compile_module = torch.compile, nn.Module.compile
    compiles, compiled = guarded(recorder.compiles), guarded(recorder.compiled)

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is not None:
            compiles(model)
        result = compile_code(model, *args, **kwargs)
        compiled(model, result)
        return result

    def compile_in_place(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compiles(self)
        compile_module(self, *args, **kwargs)

    _patch(recorder, (torch,), "compile", compile)
    _patch(recorder, (nn.Module,), "compile", compile_in_place)


@contextmanager
def record(
    folder: str | Path,
    model: Any = None,
    *,
    first_step: int = 5,
    stop_step: int = 25,
    detail: Detail = "modules",
    clock_server: bool = True,
) -> Iterator[None]:
    """Record optimizer steps ``first_step`` to ``stop_step - 1`` inside the block, and write them as a trace.

    All ranks must enter the block after ``init_process_group``, with the same ``folder`` on a shared file system.
    Pass ``model`` if it was wrapped before the block. Rank 0 assembles the trace when the block ends.

    Steps before ``first_step`` are warm-up. ``detail`` "operators" or "kernels" records more than modules, at a higher
    cost. Rank 0 opens a port for the other ranks to compare clocks with. With ``clock_server=False``, clocks are
    aligned by the ranks' collectives and messages instead, less precisely. Unlike ``headway record``, this does not
    measure links.

    Raises LaunchError without a process group and, on rank 0, if the block ends before ``first_step`` steps;
    TraceError if the folder exists.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "cannot record yet: there is no process group",
            expected="an initialised default process group",
            fix="Call init_process_group first.",
        )
    out = Path(folder)
    staging = out.parent / f".{out.name}.recording"
    _prepare(out, staging)
    recorder = Recorder(
        RecordOptions(
            folder=staging,
            first_step=first_step,
            stop_step=stop_step,
            detail=detail,
            clock_server=clock_server,
        )
    )
    _attach(recorder)
    if model is not None:
        wrapped = torch_private.compiled_from(model)
        recorder.watch(wrapped, wrapped.module)
        if wrapped is not model:
            recorder.compiles(wrapped)
            recorder.compiled(wrapped, model)
    first = dist.get_rank() == 0
    try:
        yield
    except BaseException:
        if first:
            recorder.give_up()
            files.remove_folder(staging)
        else:
            recorder.finish()  # rank 0 may have finished the block
        raise
    recorder.finish()
    if first:
        finish_recording(staging, out, dist.get_world_size())


def _prepare(out: Path, staging: Path) -> None:
    """Create the staging folder on rank 0. Raises on every rank if that fails."""
    failure: UserError | None = None
    if dist.get_rank() == 0:
        try:
            files.check_absent(out, TraceError)
            files.remove_folder(staging)
            staging.mkdir(parents=True)
        except UserError as error:
            failure = error
        except OSError as error:
            failure = TraceError(f"{out} cannot be written", got=error.strerror)
    verdict = torch.tensor([failure is not None])
    dist.broadcast(verdict, 0)
    if failure is not None:
        raise failure
    if bool(verdict):
        raise TraceError("rank 0 cannot write the recording", got=out, fix="See the error on rank 0.")
