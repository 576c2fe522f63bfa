"""Observes one rank from ``init_process_group`` to the last requested step, then writes the rank's file."""

from __future__ import annotations

import atexit
import itertools
import json
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from headway import files, torch_private
from headway.clocks import aligned
from headway.errors import HeadwayWarning, UnsupportedError, one_line
from headway.passes.optimizer import named_by_script
from headway.recording.averaging import RoundWatch
from headway.recording.chains import COMPILED, ChainWatch
from headway.recording.collectives import CollectiveTap, GroupWatch
from headway.recording.connections import (
    ClockComparison,
    ConnectionWatch,
    connection_peers,
    publish_connections,
)
from headway.recording.derive import CommunicationRows, StrategySpan, WaitRows
from headway.recording.description import (
    describe_machine,
    describe_model,
    describe_stage,
    for_replica,
    refusals,
    strategy_in_force,
)
from headway.recording.grad_access import ReadWatch
from headway.recording.memory import MemoryWatch
from headway.recording.messages import MessageWatch
from headway.recording.modules import ModuleWatch
from headway.recording.patching import Now, describe_failure, guarded, on_fault
from headway.recording.pipelines import PipelineWatch
from headway.recording.profiled import Detail, ProfiledSteps
from headway.recording.step_clock import StepClock
from headway.recording.watch import Watch
from headway.recording.watches import (
    SHARDED,
    CompiledModules,
    InputWatch,
    PauseWatch,
    UpdateWatch,
    several_models,
    sharded_root,
)
from headway.rpc import interface
from headway.strategies.decoupled.granularity import name_of
from headway.strategies.plugin import InForce
from headway.strategies.registry import plugin_named
from headway.torch_private.optimizers import after_every_step, before_every_step
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.folder import write_rank
from headway.trace.format import ClockFit, RankInfo
from headway.units import format_bytes

MAX_ROWS = 5_000_000
LINK_STEPS = 2  # steps in which modules of stages are timed, before the step in which memory is measured
PATIENCE_S = 20.0  # how long to wait for other ranks at the end of a recording
PATIENCE_WHEN_FAILED_S = 3.0  # the same, if the job failed or was told to end
PATIENCE_APART_S = 2.0  # the same, if ranks do not step together

_recordings = itertools.count()  # equal on all ranks, as every recording begins on all of them


_InForce = tuple[tuple[str, InForce], tuple[str, InForce]]


class RecordOptions(BaseModel):
    """What to record: optimizer steps ``first_step`` to ``stop_step - 1``, and where rank files go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    output: Path | None = None  # where the trace will be written; for messages only
    first_step: int = Field(default=5, ge=1)
    stop_step: int = Field(default=25, ge=2)
    clock_server: bool = True  # whether rank 0 opens a port for other ranks to compare clocks with
    measure: bool = False  # whether ranks measure their links and machines after the last recorded step
    detail: Detail = "modules"


class Recorder:
    """Records one rank. Call ``attach`` once the default process group exists; the rest is automatic.

    The steps before ``first_step`` are warm-up (DDP rebuilds its buckets after the first). After the last requested
    step all hooks are removed, clocks are compared once more and the rank's file is written.
    """

    def __init__(self, options: RecordOptions) -> None:
        self.options = options
        self.finished = False
        self.writer: threading.Thread | None = None  # the thread that is writing the file, if any
        self._once = threading.Lock()  # acquired for good by the thread that finishes
        self._patient_until_s = math.inf  # the deadline for waiting for other ranks
        self.fault = ""  # the failure of an observer that ended the recording
        self.in_order = True  # whether the recording ended normally, rather than because the job failed
        self.saw_every_step = False  # whether it ended with the last requested step, as on other ranks
        self.may_be_measured = False  # whether the recorded strategies allow measuring links
        self._now = Now()
        self._rows: list[Event] = []
        self._groups = GroupWatch()
        self._reads = ReadWatch(self._now, self._rows.append)
        self._modules = ModuleWatch(self._now, self._reads)
        self._memory = MemoryWatch()
        self._chain = ChainWatch()
        self._pipelines = PipelineWatch(self._now)
        self._compiled = CompiledModules(self._modules)
        self._tap = CollectiveTap(self._now, self._groups)
        self._communication = CommunicationRows(self._tap)
        self._rounds = RoundWatch(self._now)
        self._connections = ConnectionWatch()
        self._watches: list[Watch] = [
            self._reads,
            self._modules,
            self._memory,
            self._chain,
            self._pipelines,
            self._compiled,
            PauseWatch(self._paused),
            InputWatch(partial(self._put, Kind.INPUT, "data loader"), lambda: self._now.recording),
            self._tap,
            self._communication,
            MessageWatch(self._now, self._groups, self._pipelines),
            self._rounds,
            self._connections,
            WaitRows(self._tap, self._modules, self._communication),  # last: derived from all others
        ]
        self._profiled: ProfiledSteps | None = None
        self._handles: list[Any] = []
        self._last_handle: Any = None  # of the hook after each optimizer step
        self._model: nn.Module | None = None
        self._root: nn.Module | None = None
        self._named_implementations: dict[
            str, bool
        ] = {}  # optimizers' foreach and fused, as the script sets them
        self._ignored_models: list[str] = []  # models that were wrapped but are not recorded
        self._sharded = False  # whether fully_shard is used, without a wrapper
        self._in_force: _InForce | None = None  # the strategies seen at the end of the first recorded step
        self._undo: list[Callable[[], None]] = []
        self._written: list[Callable[[], object]] = []
        self._place = (0, 1)  # rank and world size, kept for when the process group is gone
        self._process = os.getpid()
        self._number = next(_recordings)
        self._clocks = ClockComparison(self._number)
        self._step_clock = StepClock()
        self._updates = UpdateWatch(self._updated, self._update_begins)
        self._boundary_ns = 0

    @property
    def step(self) -> int:
        """How many optimizer steps have ended."""
        return self._now.step

    # Attaching

    def attach(self) -> None:
        """Start observing this rank. The default process group must exist."""
        self._place = dist.get_rank(), dist.get_world_size()
        self._process = os.getpid()
        if self.options.clock_server:
            self._clocks.begin()
        if self.options.detail != "modules":
            place = (self.options.folder, dist.get_rank(), self.options.first_step)
            self._profiled = ProfiledSteps(self.options.detail, *place)
            self._watches.append(self._profiled)
        self._undo.append(on_fault(self._stop_observing))
        self.resume()
        atexit.register(self._finish_at_exit)
        # A child of multiprocessing may end without Python's exit handlers.
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self._finish_at_exit, exitpriority=0)

    def resume(self) -> None:
        """Install all hooks, for the first time or again after ``detach``."""
        self._handles.append(before_every_step(self._optimizer_starts))
        self._watch_step_ends()
        for watch in self._watches:
            watch.attach()
        if self._model is not None and self._root is not None and self.options.detail != "kernels":
            self._modules.watch_model(self._model, self._root)

    def _watch_step_ends(self) -> None:
        if self._last_handle is not None:
            self._last_handle.remove()
        self._last_handle = after_every_step(self._optimizer_ends)

    def when_finished(self, undo: Callable[[], None]) -> None:
        """Register ``undo``, which is called when the recording is over."""
        self._undo.append(undo)

    def when_written(self, callback: Callable[[], object]) -> None:
        """Register ``callback`` for when this rank's file or status is written. Callbacks run in this order."""
        self._written.append(callback)

    def watch(self, model: nn.Module, root: nn.Module) -> None:
        """Observe ``model``, whose parameters live in ``root``. Of several models, the largest is recorded.

        Raises UnsupportedError for a model that is not on the CPU, unless kernels are recorded.
        """
        if self.finished or model is self._model:
            return
        if self._root is not None and not self._gives_way(self._root, root):
            return
        on_device = any(parameter.device.type != "cpu" for parameter in root.parameters())
        if on_device and self.options.detail != "kernels":
            raise UnsupportedError(
                "modules on a device cannot be timed with the host's clock",
                got="parameters that are not on the CPU",
                fix="Record with --detail kernels.",
            )
        self._model, self._root = model, root
        self._step_clock.model_is(root)
        self._reads.model_is(root)
        if self.options.detail != "kernels":
            self._modules.watch_model(model, root)
            if not self._modules.unseen:
                self._modules.count_activations(root)
                self._chain.arm(root)
            self._watch_memory(first=True)

    def _gives_way(self, recorded: nn.Module, root: nn.Module) -> bool:
        """Whether ``root`` replaces the model recorded so far. The model that is not recorded is noted."""
        larger = _gradient_bytes(root) > _gradient_bytes(recorded) and self._now.step == 0
        kept, ignored = (root, recorded) if larger else (recorded, root)
        self._ignored_models.append(f"{type(ignored).__name__} ({format_bytes(_gradient_bytes(ignored))})")
        message = (
            f"more than one model was wrapped: recording modules and gradients of {type(kept).__name__}, "
            f"but only communication and updates of {type(ignored).__name__}"
        )
        warnings.warn(message, HeadwayWarning, stacklevel=3)
        if self._now.step == 0:
            self._step_clock.another_is(ignored)
        if larger:
            self._memory.end()
            self._chain.disarm()
            self._modules.start_over()
        return larger

    def compiles(self, target: Any) -> None:
        """Code is about to be compiled: remove hooks from modules that it may call, as they would break its graph."""
        self._reads.leave_parameters()
        model = self._model
        target = getattr(target, "__self__", target)  # of a method
        if model is None or self.finished or isinstance(target, torch.optim.Optimizer):
            return
        if not isinstance(target, nn.Module) or any(module is model for module in target.modules()):
            self._modules.leave_modules(passes=True)
            self._chain.disarm(COMPILED)
        elif any(module is target for module in model.modules()):
            self._modules.leave_modules(passes=False)
            self._chain.disarm(COMPILED)

    def compiled(self, target: Any, result: Any) -> None:
        """``target`` has been compiled; ``result`` is called instead of it."""
        if target is self._model and isinstance(result, nn.Module) and not self.finished:
            self._modules.watch_passes(result)

    def span(self, span: StrategySpan) -> None:
        """Record a span that a strategy's runtime reports: a collective, a wait or an update."""
        if self._now.recording:
            span.step = self._now.step
            self._communication.spans.append(span)

    # Steps

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @guarded
    def _optimizer_starts(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._reads.script_reads_end()
        if self._rounds.averages and self._last_handle is not None:
            # The hook must come after that of the averaging, which is part of the step.
            self._watch_step_ends()
        self._named_implementations.update(named_by_script(optimizer))
        return self._updates.step_begins(name_of(optimizer), args, kwargs)

    def _update_begins(self) -> None:
        for watch in self._watches:
            watch.update_begins()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @guarded
    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        now_ns = time.monotonic_ns()
        now = self._now
        guarded(self._updates.step_ends)(name_of(optimizer), now_ns)
        if self._step_clock.counts(optimizer):
            self._step_ends(now_ns)
        if now.recording:
            self._reads.stepped()

    def _stop_observing(self, failure: Exception) -> None:
        """An observer failed, perhaps inside a backward: stop recording. Steps still count, to end with other ranks."""
        if self.fault or self.finished:
            return
        self._now.recording = False
        self.fault = describe_failure(failure)
        where = f"rank {self._place[0]}: " if self._place[1] > 1 else ""
        print(
            f"headway: {where}recording stops at step {self.step}: {self.fault}; the job goes on",
            file=sys.stderr,
            flush=True,
        )

    def _step_ends(self, now_ns: int) -> None:
        if not self.fault:
            guarded(self._close_step)(now_ns)
        self._now.step += 1
        full = len(self._rows) + len(self._modules.noted) >= MAX_ROWS
        if self.fault:
            self._unhook()
        elif not full:
            guarded(self._open_step)(now_ns)
        if self._now.step >= self.options.stop_step or full:
            self._now.recording = False
            self.saw_every_step = not full
            self.finish()

    def _close_step(self, now_ns: int) -> None:
        now = self._now
        if now.recording:
            if self._in_force is None:
                self._in_force = self._strategies_in_force()
            self._put(Kind.STEP, f"step {now.step}", self._boundary_ns, now_ns)
        for watch in self._watches:
            watch.step_ends(now.step, now_ns, recorded=now.recording)

    def _strategies_in_force(self) -> _InForce:
        """The strategies of the model and of its stages. Asks DDP's reducer, which blocks during a backward."""
        return strategy_in_force(self._model), strategy_in_force(*self._pipelines.stages.values())

    def _open_step(self, now_ns: int) -> None:
        now = self._now
        for watch in self._watches:
            watch.step_begins(now.step)
        if now.step == 1 and self._model is None:
            self._look_for_sharded()
        self._watch_memory(first=False)
        self._boundary_ns = now_ns
        now.recording = self.options.first_step <= now.step < self.options.stop_step
        if now.step == self.options.first_step:
            for watch in self._watches:
                watch.recording_begins(now_ns)

    def _look_for_sharded(self) -> None:
        """The first step has ended and no model was wrapped: look for one sharded with ``fully_shard``."""
        root = sharded_root()
        self._sharded = root is not None
        if root is not None and self.options.detail != "kernels":
            self._modules.watch_passes(root, phase="forward")
            self._modules.watch_backward()

    def _watch_memory(self, *, first: bool) -> None:
        """Watch memory in the last step before the recorded ones; not with ``detail`` kernels.

        If that is step 0 or 1, the ``first`` pass is watched, as DDP rebuilds its buckets in the second.
        """
        last = self.options.first_step - 1
        if self.options.detail != "kernels":
            if self._now.step == last:
                self._pipelines.memory.arm()
            self._pipelines.time_links(last - LINK_STEPS <= self._now.step < last)
        if self._model is None or self._root is None or self.options.detail == "kernels":
            return
        if not self._now.recording and (first if last <= 1 else self._now.step == last):
            self._memory.arm(self._model, self._root)
            if not self._modules.unseen:
                self._chain.arm(self._root)

    def _put(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        self._rows.append(Event(kind, name, Stream.COMPUTE, self._now.step, start_ns, end_ns - start_ns))

    def _updated(self, name: str, start_ns: int, end_ns: int) -> None:
        if self._now.recording:
            self._put(Kind.OPTIMIZER, name, start_ns, end_ns)

    def _paused(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        if self._now.recording:
            self._put(kind, name, start_ns, end_ns)

    # Finishing

    def detach(self) -> None:
        """Remove all hooks; the job continues as if it had never been observed."""
        self._unhook()
        if self._last_handle is not None:
            self._last_handle.remove()
            self._last_handle = None

    def _unhook(self) -> None:
        """Remove all hooks except the one that counts steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for watch in reversed(self._watches):
            guarded(watch.detach)()

    def finish(self, patience_s: float | None = None) -> None:
        """Stop, compare clocks once more and write this rank's file, or its status if no complete step was recorded.

        Waits up to ``patience_s`` seconds (by default ``PATIENCE_S``) for other ranks. Does nothing in a forked child.
        """
        if self.finished or os.getpid() != self._process or not self._once.acquire(blocking=False):
            return
        self.writer = threading.current_thread()
        patience_s = PATIENCE_S if patience_s is None else patience_s
        self.in_order = patience_s >= PATIENCE_S
        if self._rounds.averages:  # other ranks may have many steps to go, in groups with this rank
            patience_s = min(patience_s, PATIENCE_APART_S)
        self._patient_until_s = time.monotonic() + patience_s
        try:
            self._stop(self._may_use_store())
            if any(row.kind == Kind.STEP for row in self._rows):
                self._write()
            else:
                self._write_status()
        except Exception as failure:  # a failed recording must not end the training
            self._report(f"could not write its recording: {one_line(str(failure))}")
            self.fault = self.fault or describe_failure(failure)
            guarded(self._write_status, self._could_not_end)()
        guarded(self._forget, self._could_not_end)()
        try:
            while self._written:
                guarded(self._written.pop(0), self._could_not_end)()
        finally:  # after an interrupt too, or the exit handler would wait for this thread
            self.writer = None
            # Only now, as the exit handler keeps the main thread alive for a thread that writes.
            atexit.unregister(self._finish_at_exit)

    def hurry(self, patience_s: float) -> None:
        """Wait at most ``patience_s`` more seconds for other ranks."""
        self._patient_until_s = min(self._patient_until_s, time.monotonic() + patience_s)

    def leave_main_thread(self) -> None:
        """Stop recording and end the profiler, which only the main thread can do; call it there."""
        self._now.recording = False
        if self._profiled is not None:
            guarded(self._profiled.end, self._could_not_end)()

    def after_backward(self, call: Callable[[], object]) -> bool:
        """Have ``call`` called when the backward in progress ends; returns False if there is none."""
        return self._modules.after_backward(call)

    def _patience_s(self) -> float:
        """How many more seconds to wait for other ranks."""
        return max(0.0, self._patient_until_s - time.monotonic())

    def _could_not_end(self, failure: Exception) -> None:
        self._report(f"could not end its recording properly: {describe_failure(failure)}")

    def _report(self, what: str) -> None:
        print(f"headway: rank {self._place[0]} {what}", file=sys.stderr, flush=True)

    def _finish_at_exit(self) -> None:
        failed = getattr(sys, "last_value", None) is not None  # then other ranks may have ended too
        self.finish(PATIENCE_WHEN_FAILED_S if failed else None)
        deadline = time.monotonic() + PATIENCE_S
        # Another thread that writes would end with this one.
        while self.writer is not None and time.monotonic() < deadline:
            time.sleep(0.05)

    def give_up(self) -> None:
        """Stop without writing: the script failed, and nobody waits for this rank's file."""
        if not self.finished:
            self.hurry(PATIENCE_WHEN_FAILED_S)
            self._stop(True)
            self._forget()
            atexit.unregister(self._finish_at_exit)

    def _stop(self, may_use_store: bool) -> None:
        self.finished = True
        self._now.recording = False
        if may_use_store:
            publish_connections(self._number, self._connections, self._patience_s)
        if self._profiled is not None:
            guarded(self._profiled.end, self._could_not_end)()
        self.detach()
        while self._undo:
            guarded(self._undo.pop(), self._could_not_end)()

    def _forget(self) -> None:
        # The model, and with it its process group, must be freed when the script drops them.
        self._model = self._root = None
        self._step_clock.forget()
        self._rows.clear()
        for watch in self._watches:
            watch.forget()
        self._clocks.close()

    def _write(self) -> None:
        rank, world_size = self._place
        fit = self._clocks.end(rank, world_size, self._patience_s)
        if self._may_use_store():
            self._connections.peers = connection_peers(
                self._number, self._connections, rank, world_size, self._patience_s
            )
        events = list(self._rows)
        for watch in self._watches:
            events = watch.add_rows(events)
        model = describe_model(
            self._model, self._root, self._modules, events, self._step_clock.optimizers, self._memory.found
        ).model_copy(update={"chain": self._chain.found})
        pipelines, stages = self._pipelines, self._pipelines.stages
        of_stages = {
            index: describe_stage(
                stage, pipelines.activation_bytes, self._step_clock.optimizers, pipelines.memory.found
            ).model_copy(update={"chain": pipelines.chain_of(index)})
            for index, stage in stages.items()
        }
        if of_stages:
            of_stage = of_stages[min(of_stages)]
            model = of_stage if self._root is None else for_replica(model, of_stage)
        last = self.options.stop_step
        kept = [row for row in events if self.options.first_step <= row.step < last]
        recorded = self._with_profile(kept, fit)
        # If the job was told to end, a backward may be in progress, in which DDP's reducer would block.
        recorded_strategies = self._strategies_in_force() if self.in_order else self._in_force
        assert recorded_strategies is not None, "a step has ended"
        (name, in_force), (order, in_order) = recorded_strategies
        strategies = {name: in_force, order: in_order}
        strategies.pop("", None)
        self.may_be_measured = any(
            plugin_named(strategy).measured_after_recordings for strategy in strategies
        )
        info = RankInfo(
            rank=rank,
            host=interface.host_name(),
            pid=os.getpid(),
            world_size=world_size,
            backend=dist.get_backend() if dist.is_initialized() else "gloo",
            version=str(torch.__version__),
            clock=fit,
            strategy={name: dict(strategy.options) for name, strategy in strategies.items()},
            buckets=in_force.buckets,
            notes=self._notes(events),
            other_models=tuple(self._ignored_models),
            fully_sharded=self._sharded,
            groups=self._groups.members,
            refusals=refusals(
                self._model,
                self._named_implementations,
                compiled_around=self._modules.passes_compiled or self._compiled.hides_forward(events),
            ),
            **describe_machine(self._root),
        )
        several = of_stages if len(stages) > 1 else {}
        write_rank(self.options.folder, info, model, recorded, several, self._rounds.described(fit))

    def _notes(self, rows: list[Event]) -> tuple[str, ...]:
        """The notes for readers of the recording."""
        notes = []
        if self.fault:
            notes.append(f"Rank {self._place[0]} stopped recording early: {self.fault}.")
        if self._ignored_models:
            notes.append(several_models(self._ignored_models))
        if self._sharded:
            notes.append(SHARDED)
        for watch in self._watches:
            notes += watch.notes(rows)
        return tuple(notes)

    def _with_profile(self, rows: list[Event], fit: ClockFit) -> Events:
        """The rows and the profiled events on rank 0's clock. Only the profile knows a device's time."""
        if self._profiled is not None and self.options.detail == "kernels":
            rows = [row for row in rows if row.kind in (Kind.LINK, Kind.DELIVERY_RATE)]
        parts = [Events.from_rows(rows)]
        if self._profiled is not None:
            parts.append(self._profiled.events())
        return aligned(Events.concatenated(parts), fit)

    def _write_status(self) -> None:
        rank, world_size = self._place
        status = {
            "rank": rank,
            "world_size": world_size,
            "steps": self._now.step,
            "model": self._model is not None,
            "fault": self.fault,
        }
        files.write_text(self.options.folder / f"status-{rank:05d}.json", json.dumps(status))

    def _may_use_store(self) -> bool:
        """Whether the job's store may be used: if the job failed, a file store may be deleted at any time."""
        return self.in_order or not torch_private.uses_file_store()


def _gradient_bytes(root: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in root.parameters() if p.requires_grad)
