"""Computes the peak memory of a pipeline rank: walks its program with the sizes measured for its passes."""

from __future__ import annotations

from collections.abc import Iterator

from headway.job import Job
from headway.model import HalvedBackward, ModelSpec, StageMemory
from headway.scheduling.pipeline.program import Post, Release, program_of
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule, RecordedPipelineSchedule


def peak_bytes(job: Job, schedule: PipelineSchedule, stage: int) -> int | None:
    """The peak memory (bytes) of the rank of ``stage``; None if it was not measured or the rank has more stages."""
    model = job.stages[stage]
    memory = model.stage_memory
    if memory is None or len(schedule.ranks) != schedule.stages:
        return None
    always_bytes = model.size_bytes + model.frozen_bytes + model.buffer_bytes
    always_bytes += model.optimizer_state_bytes + memory.batch_bytes
    outputs_bytes = schedule.micro_batches * memory.outputs_bytes
    after_bytes = memory.gradient_bytes + outputs_bytes + max(memory.end_bytes, memory.update_bytes)
    if isinstance(schedule, RecordedPipelineSchedule):
        return always_bytes + memory.received_bytes + max(memory.step_bytes, after_bytes)
    in_bytes, out_bytes = (_boundary_bytes(job, stage + side) for side in (-1, 0))
    halves = memory.halves or _estimated_halves(model, memory, in_bytes, first=stage == 0)
    held = _Held(memory, halves, in_bytes, out_bytes)
    return always_bytes + max(after_bytes, *held.moments(schedule, stage))


def _boundary_bytes(job: Job, boundary: int) -> int:
    return job.boundary_bytes[boundary] if 0 <= boundary < len(job.boundary_bytes) else 0


class _Held:
    """The memory that the rank of one stage holds, instruction by instruction, as in the live runtime.

    ``in_bytes`` is the size of a received activation and of its gradient, ``out_bytes`` that of a sent one.
    """

    def __init__(self, memory: StageMemory, halves: HalvedBackward, in_bytes: int, out_bytes: int) -> None:
        self._memory, self._halves = memory, halves
        self._in_bytes, self._out_bytes = in_bytes, out_bytes
        self._bytes = memory.gradient_bytes if memory.gradients_kept else 0
        self._makes_gradients = not memory.gradients_kept
        self._halved: dict[
            int, int
        ] = {}  # micro-batches between halves, with what of their gradient is being sent

    def moments(self, schedule: PipelineSchedule, stage: int) -> Iterator[int]:
        """The memory held (bytes) at every moment of a step that may be the peak."""
        memory, halves = self._memory, self._halves
        yield self._bytes
        for instruction in program_of(schedule, schedule.rank_of_stage[stage]):
            match instruction:
                case Post(message):
                    self._bytes += self._out_bytes if message.is_gradient else self._in_bytes
                    yield self._bytes
                case Release(message) if message.is_gradient:
                    self._release(message.of.micro_batch)
                case Action(kind=Pass.FORWARD):
                    yield self._bytes + memory.forward_bytes
                    self._bytes += memory.kept_bytes
                case Action(kind=Pass.BACKWARD):
                    yield self._bytes + self._needed(memory.first_backward_bytes, memory.backward_bytes)
                    self._leave(self._in_bytes)
                case Action(kind=Pass.INPUT_GRADIENT, micro_batch=micro_batch):
                    yield self._bytes + halves.input_bytes
                    self._bytes += halves.put_off_bytes
                    self._halved[micro_batch] = self._in_bytes
                case Action(kind=Pass.WEIGHT_GRADIENT, micro_batch=micro_batch):
                    yield self._bytes + self._needed(halves.first_weight_bytes, halves.weight_bytes)
                    self._leave(self._halved.pop(micro_batch) - halves.put_off_bytes)

    def _needed(self, first_bytes: int, later_bytes: int) -> int:
        return first_bytes if self._makes_gradients else later_bytes

    def _release(self, micro_batch: int) -> None:
        """A gradient was sent: its memory is free, unless a deferred weight gradient still needs it."""
        if micro_batch in self._halved:
            self._halved[micro_batch] = 0
        else:
            self._bytes -= self._in_bytes

    def _leave(self, more_bytes: int) -> None:
        """A backward is done: outputs and ``more_bytes`` stay, activations and received tensors are freed."""
        memory = self._memory
        self._bytes += more_bytes + memory.outputs_bytes
        self._bytes -= memory.kept_bytes + self._in_bytes + self._out_bytes
        if self._makes_gradients:
            self._bytes += memory.gradient_bytes
            self._makes_gradients = False


def _estimated_halves(model: ModelSpec, memory: StageMemory, in_bytes: int, *, first: bool) -> HalvedBackward:
    """Estimates the halves of a backward whose memory was only measured as a whole.

    torch's first stage defers all of it. Other stages keep the activations, and the output gradient of every module
    with parameters, until weight gradients are computed, one module at a time.
    """
    if first:
        return HalvedBackward(
            input_bytes=0, put_off_bytes=0,
            first_weight_bytes=memory.first_backward_bytes, weight_bytes=memory.backward_bytes,
        )  # fmt: skip
    largest_bytes = max((parameter.size_bytes for parameter in model.parameters), default=0)
    put_off_bytes = memory.weighted_bytes + in_bytes
    return HalvedBackward(
        input_bytes=put_off_bytes,
        put_off_bytes=put_off_bytes,
        first_weight_bytes=memory.gradient_bytes + largest_bytes,
        weight_bytes=2 * largest_bytes,
    )
