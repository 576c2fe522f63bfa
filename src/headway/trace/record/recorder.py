"""Recorder: observes one rank from ``init_process_group`` to the last step asked for, then writes its file."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headway import files, torch_private
from headway.errors import HeadwayWarning, UnsupportedError
from headway.model import ModelSpec
from headway.strategies.data_parallel.decoupled.kinds import name_of
from headway.strategies.data_parallel.decoupled.policy import options_of
from headway.strategies.data_parallel.decoupled.runtime import DecoupledDataParallel
from headway.strategies.data_parallel.module_spec import model_spec
from headway.trace.clocks import aligned
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.folder import write_rank
from headway.trace.format import ClockFit, RankInfo
from headway.trace.record import clock
from headway.trace.record.collectives import CollectiveTap
from headway.trace.record.connections import ConnectionWatch, Endpoint, peers_of
from headway.trace.record.derive import (
    StrategySpan,
    collective_rows,
    link_rows,
    transfer_rows,
    wait_rows,
)
from headway.trace.record.modules import ModuleWatch
from headway.trace.record.pauses import PauseWatch
from headway.trace.record.profiled import Detail, ProfiledSteps

CLOCK_KEY = "headway/clock"
LINKS_KEY = "headway/links"
LINKS_TIMEOUT = timedelta(seconds=20)
LAST_ROUNDS_TIMEOUT_S = 20.0
MAX_ROWS = 5_000_000

_recordings = itertools.count()  # the same on every rank, for recordings begin on all of them


class RecordOptions(BaseModel):
    """What to record: optimizer steps ``first_step`` to ``last_step - 1``, and where rank files go."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    first_step: int = Field(default=5, ge=1)
    last_step: int = Field(default=25, ge=2)
    clock_server: bool = True  # whether rank 0 may open a port for others to compare clocks with
    detail: Detail = "modules"


class Recorder:
    """One rank's recorder. ``attach`` once the default process group stands; the rest happens by itself.

    The steps before ``first_step`` warm up (DDP rebuilds its buckets after the first). When the last step asked
    for has ended every hook is removed, clocks are compared once more and the rank's file is written.
    """

    def __init__(self, options: RecordOptions) -> None:
        self.options = options
        self.step = 0
        self.finished = False
        self._rows: list[Event] = []
        self._spans: list[StrategySpan] = []
        self._watch = ModuleWatch(lambda: self.step, lambda: self._recording, self._rows)
        self._tap = CollectiveTap(lambda: (self.step, self._watch.phase))
        self._connections = ConnectionWatch()
        self._pauses = PauseWatch(self._paused)
        self._profiled: ProfiledSteps | None = None
        self._handles: list[Any] = []
        self._model: nn.Module | None = None
        self._root: nn.Module | None = None
        self._clock_server: clock.ClockServer | None = None
        self._clock_address: tuple[str, int] | None = None
        self._trips_before: list[clock.RoundTrip] = []
        self._step_clock: weakref.ref[torch.optim.Optimizer] | None = None
        self._parameter_ids: frozenset[int] = frozenset()
        self._undo: list[Callable[[], None]] = []
        self._number = next(_recordings)
        self._boundary_ns = 0
        self._optimizer_start_ns = 0
        self._original_next: Any = None

    @property
    def _recording(self) -> bool:
        wanted = self.options.first_step <= self.step < self.options.last_step
        return wanted and not self.finished and len(self._rows) < MAX_ROWS

    # Attaching

    def attach(self) -> None:
        """Start observing this rank. Needs the default process group."""
        self._compare_clocks_first()
        if self.options.detail != "modules":
            place = (self.options.folder, dist.get_rank(), self.options.first_step)
            self._profiled = ProfiledSteps(self.options.detail, *place)
        self.resume()
        atexit.register(self.finish)

    def resume(self) -> None:
        """Lay every hook, for the first time or again after ``detach``."""
        self._handles.append(register_optimizer_step_pre_hook(self._optimizer_starts))
        self._handles.append(register_optimizer_step_post_hook(self._optimizer_ends))
        self._tap.attach()
        self._pauses.attach()
        self._watch_input()
        if self._model is not None and self._root is not None and self.options.detail != "kernels":
            self._watch.attach(self._model, self._root)

    def when_finished(self, undo: Callable[[], None]) -> None:
        """Have ``undo`` called when the recording is over."""
        self._undo.append(undo)

    def watch(self, model: nn.Module, root: nn.Module) -> None:
        """Observe ``model``, whose parameters live in ``root``. The first model wrapped is the one recorded.

        Raises UnsupportedError for a model on a device unless kernels are recorded, and for a compiled one.
        """
        if self.finished or model is self._model:
            return
        if self._model is not None:
            message = (
                "more than one model was wrapped; modules and gradients of the first one only are recorded"
            )
            warnings.warn(message, HeadwayWarning, stacklevel=2)
            return
        if any(torch_private.is_compiled(module) for module in root.modules()):
            raise UnsupportedError(
                "recording a compiled model would recompile it for every hook",
                got="torch.compile",
                fix="Record without torch.compile.",
            )
        on_device = any(parameter.device.type != "cpu" for parameter in root.parameters())
        if on_device and self.options.detail != "kernels":
            raise UnsupportedError(
                "host clocks do not time work on a device",
                got="parameters that are not on the CPU",
                fix="Record with --detail kernels.",
            )
        self._model, self._root = model, root
        self._parameter_ids = frozenset(id(parameter) for parameter in root.parameters())
        if self.options.detail != "kernels":
            self._watch.attach(model, root)
            self._watch.count_activations(root)

    def span(self, span: StrategySpan) -> None:
        """Take a span that a strategy's runtime reports of itself: a collective, a wait or an update."""
        if self._recording:
            span.step = self.step
            self._spans.append(span)

    def _watch_input(self) -> None:
        iterator = torch_private.data_loader_iterator()
        original = self._original_next = iterator.__next__  # type: ignore[attr-defined]
        recorder = self

        def timed_next(loader: Any) -> Any:
            if not recorder._recording:
                return original(loader)
            start_ns = time.monotonic_ns()
            batch = original(loader)
            recorder._put(Kind.INPUT, "data loader", start_ns, time.monotonic_ns())
            return batch

        iterator.__next__ = timed_next  # type: ignore[attr-defined]

    def _compare_clocks_first(self) -> None:
        if not self.options.clock_server:
            return
        store = torch_private.default_store()
        key = f"{CLOCK_KEY}/{self._number}"
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if dist.get_rank() == 0:
            self._clock_server = clock.ClockServer()
            port = int(os.environ.get("MASTER_PORT", "1") or 1)
            store.set(key, json.dumps([clock.own_address_towards(master, port), self._clock_server.port]))
            return
        published, port = json.loads(store.get(key))
        # Rank 0 usually lives where everybody met; its own idea of its address may be its loopback.
        for host in (master, published):
            self._clock_address = (host, port)
            self._trips_before = clock.measure_round_trips(self._clock_address, last=False)
            if self._trips_before:
                return

    # Steps

    def _is_clock(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer's steps are the job's: the first one seen that holds the model's parameters."""
        current = self._step_clock() if self._step_clock is not None else None
        if current is optimizer:
            return True
        replaceable = current is None or (self._parameter_ids and not self._holds(current))
        if replaceable and (not self._parameter_ids or self._holds(optimizer)):
            self._step_clock = weakref.ref(optimizer)
            return True
        return False

    def _holds(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(p) in self._parameter_ids for group in optimizer.param_groups for p in group["params"])

    def _optimizer_starts(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimizer_start_ns = time.monotonic_ns()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        now_ns = time.monotonic_ns()
        if self._recording:
            self._put(Kind.OPTIMIZER, name_of(optimizer), self._optimizer_start_ns, now_ns)
        if not self._is_clock(optimizer):
            return
        if self._recording:
            self._put(Kind.STEP, f"step {self.step}", self._boundary_ns, now_ns)
            self._connections.end_step(self.step, now_ns)
            if self._profiled is not None:
                self._profiled.end_step()
        self._tap.release_finished()
        self.step += 1
        self._boundary_ns = now_ns
        if self.step == self.options.first_step:
            self._connections.begin(now_ns)
            if self._profiled is not None:
                self._profiled.begin()
        if self.step >= self.options.last_step or len(self._rows) >= MAX_ROWS:
            self.finish()

    def _put(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        self._rows.append(Event(kind, name, Stream.COMPUTE, self.step, start_ns, end_ns - start_ns))

    def _paused(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        if self._recording:
            self._put(kind, name, start_ns, end_ns)

    # Finishing

    def detach(self) -> None:
        """Remove every hook; the job goes on as if it had never been observed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.detach()
        self._pauses.detach()
        self._tap.detach()
        if self._original_next is not None:
            torch_private.data_loader_iterator().__next__ = self._original_next  # type: ignore[attr-defined]
            self._original_next = None

    def finish(self) -> None:
        """Stop, compare clocks once more and write this rank's file, or its status where no step was whole."""
        if self.finished:
            return
        self._stop()
        try:
            if any(row.kind == Kind.STEP for row in self._rows):
                self._write()
            else:
                self._write_status()
        except Exception as failure:  # training must not end because its recording does
            print(
                f"headway: rank {dist_place()[0]} could not write its recording: {failure}", file=sys.stderr
            )
        self._forget()

    def give_up(self) -> None:
        """Stop and write nothing: the script failed, and nobody waits for this rank's file."""
        if not self.finished:
            self._stop()
            self._forget()

    def _stop(self) -> None:
        self.finished = True
        self._publish_connections()
        if self._profiled is not None:
            self._profiled.end()
        self.detach()
        atexit.unregister(self.finish)
        while self._undo:
            self._undo.pop()()

    def _forget(self) -> None:
        # What a model holds, its process group among it, must go when the script lets go of it.
        self._model = self._root = self._step_clock = None
        self._rows.clear()
        self._tap.observed.clear()
        self._connections.close()
        if self._clock_server is not None:
            self._clock_server.close()

    def _write(self) -> None:
        rank, world_size = dist_place()
        fit = self._compare_clocks_last(rank, world_size)
        events = self._rows + collective_rows(self._tap.observed, self._spans) + transfer_rows(self._spans)
        events += link_rows(self._connections.uses, self._peers(rank, world_size))
        events += wait_rows(events, self._tap.observed, self._watch.compute_ends_ns, self._spans)
        last = self.options.last_step
        kept = [row for row in events if self.options.first_step <= row.step < last]
        recorded = self._with_profile(kept, fit)
        buckets, strategy = self._strategy_in_force()
        info = RankInfo(
            rank=rank,
            host=os.environ.get("HEADWAY_HOST") or socket.gethostname(),
            pid=os.getpid(),
            world_size=world_size,
            backend=dist.get_backend() if dist.is_initialized() else "gloo",
            version=str(torch.__version__),
            clock=fit,
            strategy=strategy,
            buckets=buckets,
        )
        write_rank(self.options.folder, info, self._model_spec(), recorded)

    def _with_profile(self, rows: list[Event], fit: ClockFit) -> Events:
        """The rows on rank 0's clock, and what was profiled besides; of a device's time only the profile tells."""
        if self._profiled is not None and self.options.detail == "kernels":
            rows = [row for row in rows if row.kind in (Kind.LINK, Kind.DELIVERY_RATE)]
        parts = [Events.from_rows(rows)]
        if self._profiled is not None:
            parts.append(self._profiled.events())
        return aligned(Events.concatenated(parts), fit)

    def _peers(self, rank: int, world_size: int) -> dict[tuple[Endpoint, Endpoint], int]:
        """Which rank is at the other end of each connection; nothing where others do not say in time."""
        if world_size == 1 or not dist.is_initialized():
            return {}
        store = torch_private.default_store()
        keys = [self._links_key(other) for other in range(world_size)]
        try:
            store.wait(keys, LINKS_TIMEOUT)
            published = {other: store.get(key).decode() for other, key in enumerate(keys) if other != rank}
        except RuntimeError:  # a rank that is gone publishes nothing
            return {}
        return peers_of(self._connections.uses, published)

    def _publish_connections(self) -> None:
        """Tell others of this rank's connections, first of all and in every case: they wait for it."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            with contextlib.suppress(RuntimeError):  # the store went with the rank that kept it
                torch_private.default_store().set(self._links_key(dist.get_rank()), self._connections.pairs())

    def _links_key(self, rank: int) -> str:
        return f"{LINKS_KEY}/{self._number}/{rank}"

    def _write_status(self) -> None:
        rank, world_size = dist_place()
        status = {
            "rank": rank,
            "world_size": world_size,
            "steps": self.step,
            "model": self._model is not None,
        }
        files.write_text(self.options.folder / f"status-{rank:05d}.json", json.dumps(status))

    def _compare_clocks_last(self, rank: int, world_size: int) -> ClockFit:
        if rank == 0:
            if self._clock_server is not None:
                self._clock_server.wait_for_last_rounds(world_size - 1, LAST_ROUNDS_TIMEOUT_S)
            return ClockFit()
        if self._clock_address is None:
            return clock.fit_clock((), ())
        after = clock.measure_round_trips(self._clock_address, last=True)
        return clock.fit_clock(self._trips_before, after)

    def _model_spec(self) -> ModelSpec:
        if self._root is None:
            return ModelSpec(parameters=())
        spec = model_spec(self._root)
        state_bytes = 0
        optimizer = self._step_clock() if self._step_clock is not None else None
        if optimizer is not None:
            state_bytes = sum(
                value.numel() * value.element_size()
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            )
        return spec.model_copy(
            update={
                "forward_order": tuple(self._watch.forward_order),
                "ready_order": _last_order(self._rows),
                "activation_bytes": self._watch.activation_bytes,
                "optimizer_state_bytes": state_bytes,
            }
        )

    def _strategy_in_force(self) -> tuple[tuple[tuple[str, ...], ...], dict[str, Any]]:
        if self._model is None:
            return (), {}
        if isinstance(self._model, DecoupledDataParallel):
            # The engine's, which an optimizer may have had gather gradients after all.
            schedule = self._model.schedule if self._model.engine is None else self._model.engine.schedule
            buckets = tuple(bucket.parameters for bucket in schedule.buckets)
            return buckets, {"decoupled": options_of(schedule, model_spec(self._model.module))}
        assert isinstance(self._model, nn.parallel.DistributedDataParallel)
        names = [name for name, p in self._model.module.named_parameters() if p.requires_grad]
        buckets = tuple(tuple(names[i] for i in bucket) for bucket in torch_private.ddp_buckets(self._model))
        return buckets, {"ddp": {"bucket_cap_mb": torch_private.ddp_bucket_cap_mb(self._model)}}


def dist_place() -> tuple[int, int]:
    """This process's rank and world size, from torch or, after its group is gone, from the environment."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _last_order(rows: list[Event]) -> tuple[str, ...]:
    """Parameters in the order in which the last recorded step's last backward finished them."""
    ready = [row for row in rows if row.kind == Kind.GRADIENT_READY]
    if not ready:
        return ()
    order = [row.name for row in ready if row.step == ready[-1].step]
    return tuple(reversed(dict.fromkeys(reversed(order))))
