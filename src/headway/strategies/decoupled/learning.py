"""Learning from a few steps of a live model: when gradients are ready, when modules are needed, how long parts take.

Steps are seen through hooks that exist for these steps only. What training waits for communication, and what deferred
updates take of its time, is taken out as it is told to the runtime's observer. A period begins with the first forward
after a synchronised backward, so that accumulated passes lie between forward and the backward that is reduced.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from headway import torch_private
from headway.graph.step_layout import StepProfile, UpdateCost, update_cost
from headway.model import ModelSpec
from headway.strategies.candidates import Learned, TuningEndedError
from headway.strategies.decoupled import links
from headway.strategies.decoupled.engine import Engine
from headway.strategies.live.agreement import Agreement
from headway.strategies.live.channels.observer import Collective
from headway.strategies.live.notice import Notice, WaitObserver
from headway.torch_private.optimizers import after_every_step, before_every_step


@dataclass(slots=True)
class Period:
    """The moments of one step on a clock of computation (ns), and the share of it that this thread used a CPU."""

    begin: int
    cpu_begin: int
    forward_end: int | None = None
    backward: int | None = None
    step: int | None = None
    step_end: int | None = None
    end: int = 0
    busy: float = 0.0
    disturbed: bool = False
    needs: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)


class StepWatch:
    """Watches the steps of one engine's model from ``attach`` to ``detach``. Its methods are called while training."""

    def __init__(self, module: nn.Module, engine: Engine, model: ModelSpec) -> None:
        self.periods: list[Period] = []
        self.updates: dict[int, list[int]] = defaultdict(list)  # bucket: what each of its updates took, in ns
        self._engine = weakref.ref(engine)
        self._names = {id(state.parameter): state.name for state in engine.layout.states}
        self._updates_wait = engine.schedule.gather == "gradients"
        self._open: Period | None = None
        self._reductions: int | None = None
        self._armed = self._inside_forward = False
        self._out_ns = 0
        self._thread = threading.get_ident()  # that trains: others may evaluate meanwhile
        self._handles: list[Any] = []
        self._observer: WaitObserver | None = None
        self._attach(module, engine)

    def _attach(self, module: nn.Module, engine: Engine) -> None:
        handles = self._handles
        for name, owner in module.named_modules():
            handles.append(owner.register_forward_pre_hook(Notice(self, "needed", name), prepend=True))
        # The root's own comes in front of its need.
        handles.append(module.register_forward_pre_hook(Notice(self, "forward_begins"), prepend=True))
        handles.append(module.register_forward_hook(Notice(self, "forward_ended")))
        for state in engine.layout.states:
            act = Notice(self, "ready", state.name)
            handles.append(state.parameter.register_post_accumulate_grad_hook(act))
        handles.append(before_every_step(Notice(self, "step_begins")))
        handles.append(after_every_step(Notice(self, "step_ended")))
        engine.own_handles.extend(handles)
        self._observer = WaitObserver.over(self)

    def detach(self) -> None:
        """Close the step that is open, and leave no trace."""
        self._close()
        self._open = None
        for handle in self._handles:
            handle.remove()
        engine = self._engine()
        if engine is not None:
            mine = {id(handle) for handle in self._handles}
            engine.own_handles[:] = [handle for handle in engine.own_handles if id(handle) not in mine]
        if self._observer is not None:
            self._observer.withdraw()
        self._handles.clear()

    # Told by the tuner ------------------------------------------------------------------------------

    def expect_forward(self, reductions: int) -> None:
        """A forward that learns is next; ``reductions`` synchronised backwards have begun so far."""
        self._armed = reductions != self._reductions
        self._reductions = reductions

    def disturb(self) -> None:
        """Something that is no part of training happens."""
        if self._open is not None:
            self._open.disturbed = True

    # Told by hooks ----------------------------------------------------------------------------------

    def forward_begins(self, _name: str, *_: Any) -> None:
        """The wrapped module is called."""
        if threading.get_ident() != self._thread:
            return
        self._inside_forward = torch.is_grad_enabled()
        if self._armed and self._inside_forward:
            self._armed = False
            self._close()
            self._open = Period(self._now(), time.thread_time_ns())

    def needed(self, name: str, *_: Any) -> None:
        """A module is called."""
        period = self._open
        if threading.get_ident() != self._thread:
            return
        if period is not None and period.forward_end is None and self._inside_forward:
            period.needs.setdefault(name, self._now())

    def forward_ended(self, _name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """The wrapped module returns."""
        if threading.get_ident() != self._thread:
            return
        self._inside_forward = False
        period = self._open
        if period is None or not torch.is_grad_enabled():
            return
        if period.forward_end is None:
            period.forward_end = self._now()
        begins = Notice(self, "backward_begins")
        for tensor in torch_private.tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def backward_begins(self, _name: str, *_: Any) -> None:
        """The gradient of an output is known."""
        if self._open is not None and self._open.backward is None and self._synchronised():
            self._open.backward = self._now()

    def ready(self, name: str, *_: Any) -> None:
        """A gradient is complete."""
        if self._open is not None and self._synchronised():
            self._open.ready[name] = self._now()

    def step_begins(self, _name: str, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer's step is called."""
        if self._open is not None and self._open.step is None and self._concerns(optimizer):
            self._open.step = self._now()

    def step_ended(self, _name: str, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer's step returns."""
        if self._open is not None and self._concerns(optimizer):
            self._open.step_end = self._now()

    def carried(self, _done: Collective) -> None:
        """Costs of collectives are measured apart (``links``)."""

    def waited(self, start_ns: int, end_ns: int) -> None:
        """Training stood still."""
        self._out_ns += end_ns - start_ns

    def updated(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """Training applied what was due. That is the optimizer's work only where it was deferred whole."""
        if owner is self._engine() and self._updates_wait:
            self._out_ns += end_ns - start_ns
            self.updates[bucket].append(end_ns - start_ns)

    def updated_in_background(self, owner: object, bucket: int, start_ns: int, end_ns: int) -> None:
        """A channel's thread updated this rank's share of a bucket."""
        if owner is self._engine():
            self.updates[bucket].append(end_ns - start_ns)

    # ------------------------------------------------------------------------------------------------

    def _now(self) -> int:
        return time.monotonic_ns() - self._out_ns

    def _synchronised(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.synchronise

    def _concerns(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._names for group in optimizer.param_groups for p in group["params"])

    def _close(self) -> None:
        period = self._open
        if period is None:
            return
        period.end = self._now()
        cpu_ns = time.thread_time_ns() - period.cpu_begin
        period.busy = min(1.0, cpu_ns / max(1, period.end - period.begin))
        if period.ready and period.forward_end is not None:
            self.periods.append(period)


@dataclass(frozen=True, slots=True)
class Steps:
    """What one rank's watched steps teach. ``busy`` is the share of a step in which its thread used a CPU."""

    profile: StepProfile
    update_overhead_ns: float
    busy: float


def numbers_of(periods: Sequence[Period], update: UpdateCost, model: ModelSpec) -> list[float]:
    """A rank's watched steps as equally many numbers on every rank: medians, NaN for what was not seen.

    Undisturbed steps count, or all where none was.
    """
    calm = [period for period in periods if not period.disturbed] or list(periods)
    modules = _modules(model)
    rows = [_row(period, model, modules) for period in calm]
    width = 6 + len(modules) + len(model.parameters)
    if not rows:
        return [update.overhead_ns, update.whole_ns, *[math.nan] * width]
    table = np.array(rows, dtype=np.float64)
    seen = ~np.isnan(table).all(axis=0)
    medians = np.full(width, math.nan)
    medians[seen] = np.nanmedian(table[:, seen], axis=0)
    return [update.overhead_ns, update.whole_ns, *medians.tolist()]


def slowest_steps(numbers: Sequence[Sequence[float]], model: ModelSpec) -> Steps | None:
    """What the rank with the longest computation saw; None where a rank saw no step at all."""
    if any(math.isnan(own[2]) for own in numbers):
        return None
    chosen = max(numbers, key=lambda own: own[1] + sum(own[2:7]))
    overhead_ns, whole_ns, forward, between, backward, tail, rest, _, *offsets = chosen
    modules = _modules(model)
    needs, ready = offsets[: len(modules)], offsets[len(modules) :]
    names = [parameter.name for parameter in model.parameters]
    profile = StepProfile(
        forward_ns=round(forward),
        backward_ns=round(backward),
        needs_ns=_known(modules, needs),
        ready_ns=_known(names, ready),
        between_ns=round(between),
        tail_ns=round(tail),
        rest_ns=round(rest),
        optimizer_ns=round(whole_ns),
    )
    return Steps(profile, overhead_ns, max(own[7] for own in numbers))


def _row(period: Period, model: ModelSpec, modules: Sequence[str]) -> list[float]:
    first, last = min(period.ready.values()), max(period.ready.values())
    forward_end = period.begin if period.forward_end is None else period.forward_end
    backward = max(forward_end, first if period.backward is None else min(period.backward, first))
    step_end = last if period.step_end is None else max(last, period.step_end)
    needs = [_need(period, module) for module in modules]
    ready = [period.ready.get(p.name, math.nan) - backward for p in model.parameters]
    return [
        forward_end - period.begin,
        backward - forward_end,
        max(0, last - backward),
        step_end - last,
        max(0, period.end - step_end),
        period.busy,
        *needs,
        *ready,
    ]


def _need(period: Period, module: str) -> float:
    """When forward called ``module``, or the nearest around it, whose code can use parameters of its own accord."""
    while module not in period.needs and module:
        module = module.rpartition(".")[0]
    return period.needs.get(module, math.nan) - period.begin


def _modules(model: ModelSpec) -> list[str]:
    return list(dict.fromkeys(parameter.module for parameter in model.parameters))


def _known(names: Sequence[str], offsets: Sequence[float]) -> dict[str, int]:
    known = {
        name: max(0, round(value))
        for name, value in zip(names, offsets, strict=True)
        if not math.isnan(value)
    }
    return dict(sorted(known.items(), key=lambda pair: pair[1]))


def learned(engine: Engine, model: ModelSpec, watch: StepWatch, agreement: Agreement) -> Learned:
    """What was watched on the slowest rank, and what rings cost with nothing else in flight. Collective.

    Raises TuningEndedError where a rank saw no step.
    """
    engine.settlement.settle_all()
    sharded = engine.schedule.gather == "parameters"
    sizes_bytes = {g.buckets[0].index: sum(b.size_bytes for b in g.buckets) for g in engine.layout.groups}
    if sharded:
        sizes_bytes = {bucket.index: bucket.size_bytes for bucket in engine.layout.buckets}
    update = update_cost(watch.updates, sizes_bytes, engine.transport.world_size if sharded else 1)
    steps = slowest_steps(agreement.from_each(numbers_of(watch.periods, update, model)), model)
    if steps is None:
        raise TuningEndedError("a rank saw no step of one forward and one backward")
    cluster = links.measure(
        engine.transport,
        agreement,
        model.size_bytes,
        busy=steps.busy,
        update_overhead_ns=steps.update_overhead_ns,
    )
    return Learned(steps.profile, cluster)
