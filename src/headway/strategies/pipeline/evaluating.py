"""Evaluation of a stage: forwards in torch's own order, of batches of any size, apart from what training has set up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from headway.errors import UnsupportedError
from headway.torch_private.pipelining import left_to_torch, merge_outputs_by


class Evaluation:
    """Evaluates with stages that ``make_stage`` makes, in at most ``micro_batches`` parts of one size.

    ``group`` has the ranks of the pipeline, in the order of stages. Every rank of it makes the same calls.
    """

    def __init__(
        self,
        make_stage: Callable[[], PipelineStage],
        micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._make_stage, self._most = make_stage, micro_batches
        self._group, self._device = group, device
        self._samples = 0
        self._schedule: ScheduleGPipe | None = None

    def of(self, inputs: tuple[Any, ...]) -> Any:
        """The output of the last stage, on its rank; None on the others. Only the first stage uses ``inputs``."""
        first = dist.get_rank(self._group) == 0
        samples = torch.tensor([inputs[0].shape[0] if first else 0], device=self._device)
        dist.broadcast(samples, group=self._group, group_src=0)
        if self._schedule is None or int(samples) != self._samples:
            self._samples = int(samples)
            # What torch has worked out for one size does not fit another.
            self._schedule = ScheduleGPipe(self._make_stage(), self._parts())
            left_to_torch(self._schedule)
            merge_outputs_by(self._schedule, _merged)
        return self._schedule.eval(*(inputs if first else ()))

    def _parts(self) -> int:
        return max(count for count in range(1, self._most + 1) if self._samples % count == 0)


def _merged(parts: Sequence[Any]) -> Any:
    """Of one tensor of the outputs: the samples of all parts, or the mean of numbers, as of a model's own loss."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if parts[0].dim():
        return torch.cat([*parts])
    if not parts[0].is_floating_point():
        raise UnsupportedError(
            "the model returns a number that is no mean over samples, and it is evaluated in parts",
            got=f"a tensor without dimensions of {parts[0].dtype}", expected="tensors of samples, or a loss",
            fix="Have the model return what the number is computed of.",
        )  # fmt: skip
    return torch.stack([*parts]).mean()
