"""What a stage of a pipeline holds in memory, watched in the step before those that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from headway import torch_private
from headway.memory.pass_watch import Allocations
from headway.model import HalvedBackward, StageMemory
from headway.recording.modules import JobHook

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    "forward",
    "backward",
    "input gradient",
    "weight gradient",
)


class _Watched(NamedTuple):
    """One pass: the most that was held in it and what was held behind it, in addition to what was before it."""

    most_bytes: int
    left_bytes: int


class StageMemoryWatch:
    """Watches one step of this rank's stage, with its update, once.

    Watching slows that step, which is not recorded. Nothing is watched where a rank has several stages, where the
    script has dispatch modes of its own, or compiles.
    """

    def __init__(self) -> None:
        self.found: StageMemory | None = None
        self._armed = False
        self._allocations: Allocations | None = None

    def arm(self) -> None:
        """Watch the next step of a schedule."""
        self._armed = True

    def step_begins(self, stages: Iterable[Any], given: Any) -> None:
        """A schedule begins a step of ``stages``, on a batch and targets that are among ``given``."""
        if self._allocations is not None:  # a further one before the update
            self._again = True
            return
        own = list(stages)
        if not self._armed or len(own) != 1 or torch_private.dispatch_modes():
            return
        (stage,) = own
        if torch_private.has_compiled() or any(map(torch_private.is_compiled, stage.submod.modules())):
            return
        self._armed = False
        self._module: nn.Module = stage.submod
        self._batch_bytes = _bytes_of(given)
        self._received: dict[int, int] = {}
        self._passes: dict[str, list[_Watched]] = {}
        self._weighted_bytes = self._end_bytes = self._held_at_end_bytes = self._step_bytes = 0
        self._again, self._count = False, 0
        self._kept = any(p.grad is not None for p in self._module.parameters())
        self._handles = [
            module.register_forward_hook(JobHook(self._put_out))
            for module in self._module.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        self._allocations = Allocations()
        self._allocations.__enter__()  # type: ignore[no-untyped-call]

    def begin_pass(self, kind: str, carry_out: Callable[[], Any]) -> Any:
        """Carry out a pass and note what it holds; of a forward, until ``loss_done``."""
        allocations = self._allocations
        if allocations is None or self._again:
            return carry_out()
        self._step_bytes = max(self._step_bytes, allocations.peak_bytes())
        before_bytes = allocations.held_bytes
        try:
            return carry_out()
        finally:
            self._open = (kind, before_bytes)
            if kind != FORWARD:
                self._note()

    def loss_done(self) -> None:
        """The loss behind a forward is computed, where there is one."""
        if self._allocations is not None and not self._again:
            self._note()

    def _note(self) -> None:
        assert self._allocations is not None
        kind, before_bytes = self._open
        most_bytes = self._allocations.peak_bytes()
        self._step_bytes = max(self._step_bytes, most_bytes)
        of_kind = self._passes.setdefault(kind, [])
        of_kind.append(_Watched(most_bytes - before_bytes, self._allocations.held_bytes - before_bytes))

    def receives(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are received into."""
        if self._allocations is not None:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                self._received[torch_private.storage_key(storage)] = storage.nbytes()
                self._allocations.leave_out(tensor)

    def step_ends(self, result: Any) -> None:
        """The schedule's step is done, and hands ``result`` to the script."""
        if self._allocations is None or self._again:
            return
        allocations = self._allocations
        most_bytes = allocations.peak_bytes()
        self._step_bytes = max(self._step_bytes, most_bytes)
        merged = {torch_private.storage_key(t.untyped_storage()) for t in torch_private.tensors_in(result)}
        del merged
        result_bytes = sum(allocations.holds(tensor) for tensor in _apart(torch_private.tensors_in(result)))
        self._end_bytes = most_bytes - (allocations.held_bytes - result_bytes)
        self._held_at_end_bytes = allocations.held_bytes - result_bytes
        self._count = len(self._passes.get(FORWARD, ()))
        self._gradient_bytes = sum(
            allocations.holds(p.grad)
            for p in _apart(p for p in self._module.parameters() if p.grad is not None)
        )

    def update_begins(self) -> None:
        """The optimizer is about to update."""
        if self._allocations is not None:
            self._allocations.peak_bytes()
            self._held_before_update_bytes = self._allocations.held_bytes

    def end(self) -> None:
        """The update is done, or nothing more is to be watched."""
        allocations, self._allocations = self._allocations, None
        if allocations is None:
            return
        for handle in self._handles:
            handle.remove()
        held_bytes = max(getattr(self, "_held_before_update_bytes", 0), allocations.held_bytes)
        update_bytes = max(0, allocations.peak_bytes() - held_bytes)
        allocations.stop()
        if allocations.understood:
            self.found = self._summed_up(update_bytes)

    def _summed_up(self, update_bytes: int) -> StageMemory | None:
        forwards = self._passes.get(FORWARD, [])
        backwards = self._passes.get(BACKWARD) or self._passes.get(WEIGHT_GRADIENT)
        if not forwards or not backwards or not self._count:
            return None
        kept_bytes = max(0, forwards[0].left_bytes)
        left_bytes = self._held_at_end_bytes - self._gradient_bytes
        first, *later = backwards
        return StageMemory(
            forward_bytes=max(0, forwards[0].most_bytes),
            kept_bytes=kept_bytes,
            outputs_bytes=min(kept_bytes, max(0, left_bytes) // self._count),
            first_backward_bytes=max(0, first.most_bytes),
            backward_bytes=max((max(0, each.most_bytes) for each in later), default=max(0, first.most_bytes)),
            gradient_bytes=self._gradient_bytes if self._gradient_bytes else _gradient_bytes(self._module),
            weighted_bytes=self._weighted_bytes // self._count,
            halves=self._halves(),
            batch_bytes=self._batch_bytes,
            end_bytes=max(0, self._end_bytes),
            update_bytes=update_bytes,
            gradients_kept=self._kept or self._again,
            step_bytes=self._step_bytes,
            received_bytes=sum(self._received.values()),
        )

    def _halves(self) -> HalvedBackward | None:
        inputs, weights = (self._passes.get(kind, []) for kind in (INPUT_GRADIENT, WEIGHT_GRADIENT))
        if not inputs or not weights:
            return None
        first, *later = weights
        return HalvedBackward(
            input_bytes=max(0, inputs[0].most_bytes),
            put_off_bytes=max(0, inputs[0].left_bytes),
            first_weight_bytes=max(0, first.most_bytes),
            weight_bytes=max((max(0, each.most_bytes) for each in later), default=max(0, first.most_bytes)),
        )

    def _put_out(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._allocations is not None and not self._again:
            self._weighted_bytes += sum(
                tensor.numel() * tensor.element_size() for tensor in torch_private.tensors_in(output)
            )


def _apart(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of each memory."""
    return list({torch_private.storage_key(each.untyped_storage()): each for each in tensors}.values())


def _bytes_of(given: Any) -> int:
    strided = (each for each in torch_private.tensors_in(given) if each.layout == torch.strided)
    return sum(each.untyped_storage().nbytes() for each in _apart(strided))


def _gradient_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
