"""Pipelines of ``torch.distributed.pipelining``: which stage and which micro-batch passes and messages are of."""

from __future__ import annotations

import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from headway import torch_private
from headway.model import Chain
from headway.recording.chains import ChainWatch, unwrapped
from headway.recording.layer import lay_over
from headway.recording.link_times import LinkTimes
from headway.recording.modules import count_outputs
from headway.recording.now import Now
from headway.recording.pipeline_memory import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    StageMemoryWatch,
)
from headway.trace.events import Event, Kind, Stream

PASSES = {
    "forward_one_chunk": Kind.FORWARD_PASS,
    "backward_one_chunk": Kind.BACKWARD_PASS,
    "backward_weight_one_chunk": Kind.BACKWARD_PASS,
}
MESSAGES = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops")
_LABELLED = (Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.GRADIENT_READY)


class Label(NamedTuple):
    """A stage of a pipeline, and a micro-batch."""

    stage: int = -1
    micro_batch: int = -1


class ObservedPass(NamedTuple):
    """One micro-batch's forward or backward on one stage."""

    kind: str
    label: Label
    step: int
    start_ns: int
    end_ns: int


class PipelineWatch:
    """Observes the stages of this process while attached."""

    def __init__(self, now: Now) -> None:
        self.observed: list[ObservedPass] = []
        self.stages: dict[int, Any] = {}  # by their indices
        self.activation_bytes: dict[
            int, int
        ] = {}  # what one micro-batch's forward leaves for backward, about
        self.memory = StageMemoryWatch()
        self._chains: dict[int, ChainWatch] = {}
        self._link_times: dict[int, LinkTimes] = {}
        self._times_links = False
        self._now = now
        self._labels: Any = WeakIdKeyDictionary()  # of tensors that are sent, or received into
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Begin to watch, unless it has begun, or torch's pipelines are not imported yet."""
        stage = torch_private.pipeline_stage()
        if stage is None or self._undo:
            return
        for name, kind in PASSES.items():
            self._undo.append(lay_over(stage, name, functools.partial(self._passes, kind)))
        for name in MESSAGES:
            self._undo.append(lay_over(stage, name, self._messages))
        for schedule in torch_private.pipeline_schedules():
            self._undo.append(lay_over(schedule, "step", self._steps))
        self._undo.append(
            lay_over(torch_private.pipeline_schedule(), torch_private.COMPUTE_LOSS, self._losses)
        )

    def detach(self) -> None:
        """Leave no trace."""
        while self._undo:
            self._undo.pop()()
        self._labels = WeakIdKeyDictionary()
        self.memory.end()
        for watch in self._chains.values():
            watch.disarm()
        for times in self._link_times.values():
            times.detach()

    def label_of(self, tensors: Iterable[torch.Tensor]) -> Label:
        """The stage and the micro-batch that one of ``tensors`` is sent or received for, if any is."""
        return next((self._labels[each] for each in tensors if each in self._labels), Label())

    def _passes(
        self, kind: str, original: Callable[..., Any], stage: Any, micro_batch: int, *args: Any, **kwargs: Any
    ) -> Any:
        counted = self._counted(stage) if kind == Kind.FORWARD_PASS else None
        start_ns = time.monotonic_ns()
        try:
            held_by = _held_by(original.__name__, args, kwargs)
            carry_out = functools.partial(original, stage, micro_batch, *args, **kwargs)
            ends = functools.partial(
                torch_private.ends_of_backward, stage, micro_batch, args[0] if args else kwargs.get("loss")
            )
            times = self._link_times.get(stage.stage_index) if self._times_links else None
            if times is not None and held_by in (FORWARD, BACKWARD):
                timed = times.forward if held_by == FORWARD else times.backward
                return timed(carry_out)
            return self.memory.begin_pass(held_by, carry_out, ends)
        finally:
            if counted is not None:
                self.activation_bytes[stage.stage_index] = counted()
            if self._now.recording:
                label = Label(stage.stage_index, micro_batch)
                self.observed.append(ObservedPass(kind, label, self._now.step, start_ns, time.monotonic_ns()))

    def _counted(self, stage: Any) -> Callable[[], int] | None:
        """Begin to sum what modules put out in the first forward of ``stage`` that is seen; None in later ones."""
        if stage.stage_index in self.stages:
            return None
        self.stages[stage.stage_index] = stage
        self._chains[stage.stage_index] = ChainWatch()
        self._chains[stage.stage_index].arm(stage.submod)
        return count_outputs(stage.submod)

    def time_links(self, wanted: bool) -> None:
        """Time the modules of stages that are chains, or no longer."""
        if wanted and not self._times_links:
            for index, watch in self._chains.items():
                if watch.found is not None and watch.found.links and index not in self._link_times:
                    self._link_times[index] = LinkTimes(unwrapped(self.stages[index].submod), watch.found)
        elif not wanted:
            for times in self._link_times.values():
                times.detach()
        self._times_links = wanted

    def chain_of(self, index: int) -> Chain | None:
        """The chain of a stage's modules, with their times where they were timed."""
        if index in self._link_times:
            return self._link_times[index].timed()
        return self._chains[index].found if index in self._chains else None

    def forget(self) -> None:
        """Let go of what was observed."""
        self.observed.clear()
        self.stages.clear()
        self.activation_bytes.clear()
        self._chains.clear()
        self._link_times.clear()

    def _steps(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        self.memory.step_begins(torch_private.stages_of(schedule), (args, kwargs))
        result = original(schedule, *args, **kwargs)
        self.memory.step_ends(result)
        return result

    def _losses(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        self.memory.loss_done()
        return loss

    def _messages(self, original: Callable[..., Any], stage: Any, micro_batch: int) -> Any:
        operations = original(stage, micro_batch)
        if "recv" in original.__name__:
            self.memory.receives(operation.tensor for operation in operations)
        for operation in operations:
            self._labels[operation.tensor] = Label(stage.stage_index, micro_batch)
        return operations


def _held_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Which of the passes that differ in what they hold the method ``name`` of a stage carries out."""
    if PASSES[name] == Kind.FORWARD_PASS:
        return FORWARD
    if name == "backward_weight_one_chunk":
        return WEIGHT_GRADIENT
    whole = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
    return BACKWARD if whole else INPUT_GRADIENT


def labelled(rows: Sequence[Event], observed: Sequence[ObservedPass]) -> list[Event]:
    """``rows`` with the stage and the micro-batch of those inside a pass, and passes that are not among them."""
    passes = sorted(observed, key=lambda each: each.start_ns)
    starts_ns = [each.start_ns for each in passes]
    seen = set()
    found = []
    for row in rows:
        at = bisect_right(starts_ns, row.start_ns) - 1
        if row.kind in _LABELLED and at >= 0 and row.end_ns <= passes[at].end_ns:
            row = row._replace(stage=passes[at].label.stage, micro_batch=passes[at].label.micro_batch)
            if row.kind == passes[at].kind:
                seen.add(at)
        found.append(row)
    found += [
        Event(
            each.kind, "", Stream.COMPUTE, each.step, each.start_ns, each.end_ns - each.start_ns,
            stage=each.label.stage, micro_batch=each.label.micro_batch,
        )
        for at, each in enumerate(passes) if at not in seen
    ]  # fmt: skip
    return found
