"""Observes pipelines of ``torch.distributed.pipelining``: stages, micro-batches, memory and times of chained modules.

``PipelineWatch`` patches stages and schedules and labels passes and messages with their stage and micro-batch.
``StageMemoryWatch`` measures what one step of a stage holds in memory, ``ChainTimer`` times the modules of its chain.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from headway import torch_private
from headway.memory.halves import WholeBackward
from headway.memory.pass_watch import Allocations
from headway.model import Chain, HalvedBackward, StageMemory
from headway.recording.chains import ChainWatch, unwrapped
from headway.recording.modules import JobHook, count_outputs, tensors_of
from headway.recording.patching import Now, guarded, patch_method
from headway.recording.watch import Watch
from headway.trace.events import Event, Kind, Stream

T = TypeVar("T")


class ChainTimer:
    """Times the modules of one stage's chain, in each micro-batch's forward and backward, while attached.

    A forward is divided at the calls of the modules, a backward at the moments when the gradients of their outputs are
    ready. Time before and after the chain counts toward its first and last module.
    """

    def __init__(self, stage: nn.Module, chain: Chain) -> None:
        self._chain = chain
        self._entered_ns: list[int] = []
        self._came_back: list[
            tuple[int, int]
        ] = []  # time, and place of the module whose output gradient was ready
        self._forwards: list[list[int]] = []
        self._backwards: list[list[int]] = []
        self._handles = []
        for place, link in enumerate(chain.links):
            module = stage.get_submodule(link.name)
            self._handles.append(module.register_forward_pre_hook(JobHook(self._enter)))
            self._handles.append(module.register_forward_hook(_Mark(self._came_back, place)))

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward(self, carry_out: Callable[[], T]) -> T:
        """Time a forward."""
        self._entered_ns.clear()
        begin_ns = time.monotonic_ns()
        result = carry_out()
        end_ns = time.monotonic_ns()
        if len(self._entered_ns) == len(self._chain.links):
            self._forwards.append(_between([begin_ns, *self._entered_ns[1:], end_ns]))
        return result

    def backward(self, carry_out: Callable[[], T]) -> T:
        """Time a whole backward."""
        self._came_back.clear()
        begin_ns = time.monotonic_ns()
        result = carry_out()
        end_ns = time.monotonic_ns()
        if [place for _, place in self._came_back] == list(range(len(self._chain.links)))[::-1]:
            moments = [at_ns for at_ns, _ in self._came_back]
            self._backwards.append(_between([begin_ns, *moments[1:], end_ns])[::-1])
        return result

    def timed(self) -> Chain:
        """The chain with the modules' median times; unchanged if nothing was timed."""
        if not self._forwards or not self._backwards:
            return self._chain
        links = [
            link.model_copy(
                update={
                    "forward_ns": _median(self._forwards, place),
                    "backward_ns": _median(self._backwards, place),
                }
            )
            for place, link in enumerate(self._chain.links)
        ]
        return self._chain.model_copy(update={"links": tuple(links)})

    def _enter(self, _module: nn.Module, _inputs: Any) -> None:
        self._entered_ns.append(time.monotonic_ns())


class _Mark(JobHook):
    """Hook: notes when the gradient of a module's output is ready."""

    def __init__(self, noted: list[tuple[int, int]], place: int) -> None:
        super().__init__(self._mark)
        self._noted, self._place = noted, place

    def _mark(self, *arguments: Any) -> None:
        """Hook the autograd node of the output."""
        for tensor in tensors_of(arguments[-1]):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(guarded(self._there))

    def _there(self, _gradients: Any) -> None:
        self._noted.append((time.monotonic_ns(), self._place))


def _between(moments: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in pairwise(moments)]


def _median(rows: Sequence[Sequence[int]], place: int) -> int:
    return round(median(row[place] for row in rows))


FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    "forward",
    "backward",
    "input gradient",
    "weight gradient",
)

Ends = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


class StageMemoryWatch:
    """Measures the memory of one step of this rank's stage, including the update.

    Watching slows that step, which is not recorded. Nothing is watched if the rank has several stages, or the script
    uses dispatch modes or torch.compile.
    """

    def __init__(self) -> None:
        self.found: StageMemory | None = None
        self._armed = False
        self._step: _Step | None = None
        self._again = False  # whether a second step began before the update

    def arm(self) -> None:
        """Watch the next step of a schedule."""
        self._armed = True

    def step_begins(self, stages: Sequence[Any], inputs: Any) -> None:
        """A schedule begins a step of ``stages``; ``inputs`` hold the batch and the targets."""
        if self._step is not None:
            self._again = True
        elif self._armed and len(stages) == 1 and _may_be_watched(stages[0].submod):
            self._armed = self._again = False
            self._step = _Step(stages[0], inputs)

    def begin_pass(self, kind: str, carry_out: Callable[[], Any], ends: Callable[[], Ends]) -> Any:
        """Run a pass and measure what it holds; a forward is measured until ``loss_done``.

        ``ends()`` returns where a backward begins (its loss or outputs) and ends (its inputs).
        """
        step = self._watched
        if step is None:
            return carry_out()
        step.pass_begins(kind)
        if kind == BACKWARD:
            step.looks_into(ends)
        try:
            return carry_out()
        finally:
            if kind != FORWARD:
                step.pass_ends()

    def loss_done(self) -> None:
        """The loss after a forward, if there is one, is computed."""
        if (step := self._watched) is not None:
            step.pass_ends()

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        """``tensors`` are receive buffers, which are counted separately."""
        if self._step is not None:
            self._step.receives(tensors)

    def step_ends(self, result: Any) -> None:
        """The schedule's step is done, and returns ``result`` to the script."""
        if (step := self._watched) is not None:
            step.ends(result)

    def update_begins(self) -> None:
        """The optimizer is about to update."""
        if self._step is not None:
            self._step.update_begins()

    def end(self) -> None:
        """Stop watching: the update is done, or the recorder detaches."""
        step, self._step = self._step, None
        if step is not None:
            self.found = step.close()
            if self.found is not None and self._again:
                self.found = self.found.model_copy(update={"gradients_kept": True})

    @property
    def _watched(self) -> _Step | None:
        return None if self._again else self._step


class _Pass(NamedTuple):
    """One pass: the peak during it and what is left after it, both relative to what was held before."""

    most_bytes: int
    left_bytes: int


class _Step:
    """The measurements of one step of ``stage``."""

    def __init__(self, stage: Any, inputs: Any) -> None:
        self._stage = stage
        self._module: nn.Module = stage.submod
        self._batch_bytes = _bytes_of(inputs)
        self._received: dict[int, int] = {}
        self._passes: dict[str, list[_Pass]] = {}
        self._open: tuple[str, int] | None = None  # the pass in progress, and the bytes held before it
        self._weighted_bytes = self._most_bytes = self._held_bytes = 0
        self._kept = any(p.grad is not None for p in self._module.parameters())
        self._ended: dict[str, int] | None = None
        self._whole: WholeBackward | None = None
        self._halved: HalvedBackward | None = None  # estimated from a full backward
        self._handles = [
            module.register_forward_hook(JobHook(self._put_out))
            for module in self._module.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        self._allocations = Allocations()
        self._allocations.__enter__()  # type: ignore[no-untyped-call]

    def pass_begins(self, kind: str) -> None:
        self._peak_bytes()
        self._open = kind, self._allocations.held_bytes

    def pass_ends(self) -> None:
        if self._open is None:
            return
        (kind, before_bytes), self._open = self._open, None
        observed = _Pass(self._peak_bytes() - before_bytes, self._allocations.held_bytes - before_bytes)
        self._passes.setdefault(kind, []).append(observed)
        if self._whole is not None:
            self._halved, self._whole = self._whole.end(), None

    def looks_into(self, ends: Callable[[], Ends]) -> None:
        """A full backward begins: estimate from the first one what its two halves would hold.

        Skipped for DistributedDataParallel, whose hooks would not run in halved backwards.
        """
        if BACKWARD in self._passes or isinstance(self._module, DistributedDataParallel):
            return
        try:
            parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._whole = WholeBackward(self._allocations, *ends(), parameters)
        except Exception:  # training goes on, whatever the stage is made of
            self._whole = None

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._received[torch_private.storage_key(storage)] = storage.nbytes()
            self._allocations.leave_out(tensor)

    def ends(self, result: Any) -> None:
        """Note the bytes of gradients and of what is kept for the script; ``result`` is returned to it."""
        self._peak_bytes()
        count = max(1, len(self._passes.get(FORWARD, ())))
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        self._ended = {
            "outputs_bytes": self._bytes_made(torch_private.kept_outputs(self._stage)) // count,
            "end_bytes": self._bytes_made(result),
            "weighted_bytes": self._weighted_bytes // count,
            "gradient_bytes": _bytes_of(gradients),
        }

    def update_begins(self) -> None:
        self._allocations.peak_bytes()
        self._held_bytes = self._allocations.held_bytes

    def close(self) -> StageMemory | None:
        """The measurements; None if the step had no backward, or had tensors whose memory cannot be determined."""
        for handle in self._handles:
            handle.remove()
        held_bytes = max(self._held_bytes, self._allocations.held_bytes)
        update_bytes = max(0, self._allocations.peak_bytes() - held_bytes)
        self._allocations.stop()
        forwards = self._passes.get(FORWARD)
        first, later = self._backward_bytes()
        if self._ended is None or not forwards or not first or not self._allocations.understood:
            return None
        return StageMemory(
            forward_bytes=max(0, forwards[0].most_bytes),
            kept_bytes=max(0, forwards[0].left_bytes),
            first_backward_bytes=first,
            backward_bytes=later,
            halves=self._halves() or self._halved,
            batch_bytes=self._batch_bytes,
            update_bytes=update_bytes,
            gradients_kept=self._kept,
            step_bytes=self._most_bytes,
            received_bytes=sum(self._received.values()),
            **self._ended,
        )

    def _backward_bytes(self) -> tuple[int, int]:
        """The peak of the first backward, and of later ones; for halved backwards, over both halves."""
        if backwards := self._passes.get(BACKWARD):
            return _first_and_later(backwards)
        halves = self._halves()
        if halves is None:
            return 0, 0
        first, later = (
            max(halves.input_bytes, halves.put_off_bytes + weight_bytes)
            for weight_bytes in (halves.first_weight_bytes, halves.weight_bytes)
        )
        return first, later

    def _halves(self) -> HalvedBackward | None:
        inputs, weights = (self._passes.get(kind) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT))
        if not inputs or not weights:
            return None
        first, later = _first_and_later(weights)
        return HalvedBackward(
            input_bytes=max(0, *(input_.most_bytes for input_ in inputs)),
            put_off_bytes=max(0, inputs[0].left_bytes), first_weight_bytes=first, weight_bytes=later,
        )  # fmt: skip

    def _bytes_made(self, value: Any) -> int:
        """The bytes of tensors in ``value`` that were allocated in this step."""
        return sum(self._allocations.holds(tensor) for tensor in _apart(torch_private.tensors_in(value)))

    def _peak_bytes(self) -> int:
        peak_bytes = self._allocations.peak_bytes()
        self._most_bytes = max(self._most_bytes, peak_bytes)
        return peak_bytes

    def _put_out(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._weighted_bytes += sum(
            tensor.numel() * tensor.element_size() for tensor in torch_private.tensors_in(output)
        )


def _may_be_watched(module: nn.Module) -> bool:
    if torch_private.dispatch_modes() or torch_private.has_compiled():
        return False
    return not any(map(torch_private.is_compiled, module.modules()))


def _first_and_later(passes: Sequence[_Pass]) -> tuple[int, int]:
    """The peak of the first of ``passes``, and of the later ones (the first's if there are none)."""
    first, *later = (max(0, pass_.most_bytes) for pass_ in passes)
    return first, max(later, default=first)


def _apart(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor for each distinct storage, of strided tensors only."""
    strided = (tensor for tensor in tensors if tensor.layout == torch.strided)
    return list({torch_private.storage_key(tensor.untyped_storage()): tensor for tensor in strided}.values())


def _bytes_of(value: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _apart(torch_private.tensors_in(value)))


PASSES = {
    "forward_one_chunk": Kind.FORWARD_PASS,
    "backward_one_chunk": Kind.BACKWARD_PASS,
    "backward_weight_one_chunk": Kind.BACKWARD_PASS,
}
MESSAGES = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops")
_LABELLED = (Kind.FORWARD_PASS, Kind.FORWARD, Kind.BACKWARD_PASS, Kind.BACKWARD, Kind.GRADIENT_READY)


class Label(NamedTuple):
    """The pipeline stage and micro-batch of an event; -1 if unknown."""

    stage: int = -1
    micro_batch: int = -1


class ObservedPass(NamedTuple):
    """One micro-batch's forward or backward on one stage."""

    kind: str
    label: Label
    step: int
    start_ns: int
    end_ns: int


class PipelineWatch(Watch):
    """Observes the pipeline stages of this process while attached."""

    def __init__(self, now: Now) -> None:
        self.observed: list[ObservedPass] = []
        self.stages: dict[int, Any] = {}  # by their indices
        # stage -> roughly the bytes that one micro-batch's forward keeps for backward
        self.activation_bytes: dict[int, int] = {}
        self.memory = StageMemoryWatch()
        self._chains: dict[int, ChainWatch] = {}
        self._link_times: dict[int, ChainTimer] = {}
        self._times_links = False
        self._now = now
        self._labels: Any = WeakIdKeyDictionary()  # of tensors that are sent, or received into
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Start watching, unless already started, or ``torch.distributed.pipelining`` is not imported yet."""
        stage = torch_private.pipeline_stage()
        if stage is None or self._undo:
            return
        for name, kind in PASSES.items():
            self._undo.append(patch_method(stage, name, functools.partial(self._passes, kind)))
        for name in MESSAGES:
            self._undo.append(patch_method(stage, name, self._messages))
        for schedule in torch_private.pipeline_schedules():
            self._undo.append(patch_method(schedule, "step", self._steps))
        self._undo.append(
            patch_method(torch_private.pipeline_schedule(), torch_private.COMPUTE_LOSS, self._losses)
        )

    def detach(self) -> None:
        """Remove all patches and hooks."""
        while self._undo:
            self._undo.pop()()
        self._labels = WeakIdKeyDictionary()
        self.memory.end()
        for watch in self._chains.values():
            watch.disarm()
        for times in self._link_times.values():
            times.detach()

    def step_begins(self, step: int) -> None:
        """Try to attach again after the first step, in which torch's pipelines may have been imported."""
        if step == 1:
            self.attach()

    def update_begins(self) -> None:
        """An optimizer begins to update."""
        self.memory.update_begins()

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        """The update is done."""
        self.memory.end()

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Label the events inside passes, and add passes that are missing."""
        return labelled(rows, self.observed)

    def label_of(self, tensors: Iterable[torch.Tensor]) -> Label:
        """The stage and micro-batch for which one of ``tensors`` is sent or received; ``Label()`` if there is none."""
        return next((self._labels[tensor] for tensor in tensors if tensor in self._labels), Label())

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
        """Start summing module outputs in the first forward of ``stage``; None in later ones."""
        if stage.stage_index in self.stages:
            return None
        self.stages[stage.stage_index] = stage
        self._chains[stage.stage_index] = ChainWatch()
        self._chains[stage.stage_index].arm(stage.submod)
        return count_outputs(stage.submod)

    def time_links(self, wanted: bool) -> None:
        """Start or stop timing the modules of stages that are chains."""
        if wanted and not self._times_links:
            for index, watch in self._chains.items():
                if watch.found is not None and watch.found.links and index not in self._link_times:
                    self._link_times[index] = ChainTimer(unwrapped(self.stages[index].submod), watch.found)
        elif not wanted:
            for times in self._link_times.values():
                times.detach()
        self._times_links = wanted

    def chain_of(self, index: int) -> Chain | None:
        """The chain of a stage's modules, with their times if they were measured."""
        if index in self._link_times:
            return self._link_times[index].timed()
        return self._chains[index].found if index in self._chains else None

    def forget(self) -> None:
        """Drop everything observed."""
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
    """Which kind of pass, in terms of memory, the method ``name`` of a stage runs."""
    if PASSES[name] == Kind.FORWARD_PASS:
        return FORWARD
    if name == "backward_weight_one_chunk":
        return WEIGHT_GRADIENT
    is_full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
    return BACKWARD if is_full else INPUT_GRADIENT


def labelled(rows: Sequence[Event], observed: Sequence[ObservedPass]) -> list[Event]:
    """``rows`` labelled with stage and micro-batch where they lie inside a pass, plus the passes missing from them."""
    passes = sorted(observed, key=lambda pass_: pass_.start_ns)
    starts_ns = [pass_.start_ns for pass_ in passes]
    seen = set()
    events = []
    for row in rows:
        at = bisect_right(starts_ns, row.start_ns) - 1
        if row.kind in _LABELLED and at >= 0 and row.end_ns <= passes[at].end_ns:
            row = row._replace(stage=passes[at].label.stage, micro_batch=passes[at].label.micro_batch)
            if row.kind == passes[at].kind:
                seen.add(at)
        events.append(row)
    events += [
        Event(
            pass_.kind, "", Stream.COMPUTE, pass_.step, pass_.start_ns, pass_.end_ns - pass_.start_ns,
            stage=pass_.label.stage, micro_batch=pass_.label.micro_batch,
        )
        for at, pass_ in enumerate(passes) if at not in seen
    ]  # fmt: skip
    return events
