"""What a stage of a pipeline holds in memory, watched in the step before those that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway import torch_private
from headway.memory.halves import WholeBackward
from headway.memory.pass_watch import Allocations
from headway.model import HalvedBackward, StageMemory
from headway.recording.modules import JobHook

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    "forward",
    "backward",
    "input gradient",
    "weight gradient",
)

Ends = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


class StageMemoryWatch:
    """Watches one step of this rank's stage, with its update, once.

    Watching slows that step, which is not recorded. Nothing is watched where a rank has several stages, where the
    script has dispatch modes of its own, or compiles.
    """

    def __init__(self) -> None:
        self.found: StageMemory | None = None
        self._armed = False
        self._step: _Step | None = None
        self._again = False  # whether a second step was made before the update

    def arm(self) -> None:
        """Watch the next step of a schedule."""
        self._armed = True

    def step_begins(self, stages: Sequence[Any], given: Any) -> None:
        """A schedule begins a step of ``stages``, on a batch and targets that are among ``given``."""
        if self._step is not None:
            self._again = True
        elif self._armed and len(stages) == 1 and _may_be_watched(stages[0].submod):
            self._armed = self._again = False
            self._step = _Step(stages[0], given)

    def begin_pass(self, kind: str, carry_out: Callable[[], Any], ends: Callable[[], Ends]) -> Any:
        """Carry out a pass and note what it holds; of a forward, until ``loss_done``.

        ``ends`` has a backward's loss or outputs, and the inputs that gradients go to.
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
        """The loss behind a forward is computed, where there is one."""
        if (step := self._watched) is not None:
            step.pass_ends()

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are received into."""
        if self._step is not None:
            self._step.receives(tensors)

    def step_ends(self, result: Any) -> None:
        """The schedule's step is done, and hands ``result`` to the script."""
        if (step := self._watched) is not None:
            step.ends(result)

    def update_begins(self) -> None:
        """The optimizer is about to update."""
        if self._step is not None:
            self._step.update_begins()

    def end(self) -> None:
        """The update is done, or nothing more is to be watched."""
        step, self._step = self._step, None
        if step is not None:
            self.found = step.close()
            if self.found is not None and self._again:
                self.found = self.found.model_copy(update={"gradients_kept": True})

    @property
    def _watched(self) -> _Step | None:
        return None if self._again else self._step


class _Pass(NamedTuple):
    """One pass: the most that was held in it and what was held behind it, in addition to what was before it."""

    most_bytes: int
    left_bytes: int


class _Step:
    """One step of ``stage`` while it is watched, from its begin on."""

    def __init__(self, stage: Any, given: Any) -> None:
        self._stage = stage
        self._module: nn.Module = stage.submod
        self._batch_bytes = _bytes_of(given)
        self._received: dict[int, int] = {}
        self._passes: dict[str, list[_Pass]] = {}
        self._open: tuple[str, int] | None = None  # the pass in progress, and what was held before it
        self._weighted_bytes = self._most_bytes = self._held_bytes = 0
        self._kept = any(p.grad is not None for p in self._module.parameters())
        self._ended: dict[str, int] | None = None
        self._whole: WholeBackward | None = None
        self._halved: HalvedBackward | None = None  # told from a whole one
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
        found = _Pass(self._peak_bytes() - before_bytes, self._allocations.held_bytes - before_bytes)
        self._passes.setdefault(kind, []).append(found)
        if self._whole is not None:
            self._halved, self._whole = self._whole.end(), None

    def looks_into(self, ends: Callable[[], Ends]) -> None:
        """A whole backward begins: see in the first what halves of it would hold.

        DDP has hooks that halves would leave out, and is not halved.
        """
        if BACKWARD in self._passes or isinstance(self._module, DistributedDataParallel):
            return
        try:
            parameters = [each for each in self._module.parameters() if each.requires_grad]
            self._whole = WholeBackward(self._allocations, *ends(), parameters)
        except Exception:  # whatever a stage is made of: training goes on
            self._whole = None

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._received[torch_private.storage_key(storage)] = storage.nbytes()
            self._allocations.leave_out(tensor)

    def ends(self, result: Any) -> None:
        """Note what is held for the script, and gradients; ``result`` is what it is handed."""
        self._peak_bytes()
        count = max(1, len(self._passes.get(FORWARD, ())))
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        self._ended = {
            "outputs_bytes": self._bytes_made(torch_private.outputs_kept(self._stage)) // count,
            "end_bytes": self._bytes_made(result),
            "weighted_bytes": self._weighted_bytes // count,
            "gradient_bytes": _bytes_of(gradients),
        }

    def update_begins(self) -> None:
        self._allocations.peak_bytes()
        self._held_bytes = self._allocations.held_bytes

    def close(self) -> StageMemory | None:
        """What was found; None unless it was a step with backwards, and of tensors that are understood."""
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
        """The most in the first backward, and in others; of halved ones, in both halves together."""
        if whole := self._passes.get(BACKWARD):
            return _first_and_later(whole)
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
            input_bytes=max(0, *(each.most_bytes for each in inputs)),
            put_off_bytes=max(0, inputs[0].left_bytes), first_weight_bytes=first, weight_bytes=later,
        )  # fmt: skip

    def _bytes_made(self, value: Any) -> int:
        """What the tensors in ``value`` hold of what was made in the step."""
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
    """The most in the first of ``passes``, and in the others where there are any."""
    first, *later = (max(0, each.most_bytes) for each in passes)
    return first, max(later, default=first)


def _apart(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of each memory that can be told."""
    known = (each for each in tensors if each.layout == torch.strided)
    return list({torch_private.storage_key(each.untyped_storage()): each for each in known}.values())


def _bytes_of(value: Any) -> int:
    return sum(each.untyped_storage().nbytes() for each in _apart(torch_private.tensors_in(value)))
