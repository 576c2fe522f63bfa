"""The replicas of a stage in pipelines side by side: one strategy averages their gradients, all else is here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from headway.errors import UserError
from headway.strategies.pipeline.placement import Placement

Replicate = Callable[[nn.Module, dist.ProcessGroup], nn.Module]
"""Wraps a stage, so that it averages gradients with the other ranks of a group."""


class Replicas:
    """This rank's ``stage`` among its replicas, ``wrapped`` by what ``replicate`` makes of it; alone it stays as it is.

    A stage none of whose parameters are trained has no gradients to average.
    """

    def __init__(
        self, stage: nn.Module, placement: Placement, replicate: Replicate | None, device: torch.device
    ) -> None:
        self._stage, self._place, self._device = stage, placement, device
        self._trained = self._trainable()
        self.wrapped = stage
        if placement.replicas is not None and self._trained:
            assert replicate is not None, "replicas average gradients"
            self.wrapped = replicate(stage, placement.replicas)

    def begin_step(self, samples: int) -> None:
        """Every rank calls it before a step that trains, with how many ``samples`` it gives its pipeline.

        Raises UserError on every rank where pipelines are given other numbers: a mean over pipelines is that over
        samples only where each has as many. Raises it too where other parameters are trained than when the stage was
        wrapped, which replicas would not average.
        """
        if self._place.replicas is None:
            return
        if changed := self._trainable() ^ self._trained:
            raise UserError(
                "other parameters are trained than when the model was parallelized",
                got=f"requires_grad of {', '.join(sorted(changed)[:4])} was changed",
                fix="Freeze parameters before headway.parallelize, or call it again on a new model.",
            )
        counts = torch.zeros(self._place.pipelines, dtype=torch.int64, device=self._device)
        counts[self._place.pipeline] = samples
        dist.all_reduce(counts)
        given = counts.tolist()
        if len(set(given)) > 1:
            raise UserError(
                "pipelines were given batches of other sizes",
                got=", ".join(f"{each} samples" for each in given),
                expected="as many samples for each pipeline",
                fix="Give every pipeline as large a part of the batch (drop_last=True in a DataLoader).",
            )
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give every replica the buffers of the first pipeline's, as DistributedDataParallel does before a forward."""
        if self._place.replicas is None:
            return
        with torch.no_grad():
            for buffer in self._stage.buffers():
                dist.broadcast(buffer, self._place.ranks[0][self._place.stage], group=self._place.replicas)

    def mean_of(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over pipelines of ``loss``, which their last ranks know, on every rank."""
        known = loss if self._place.is_last else torch.zeros_like(loss)
        dist.all_reduce(known)
        return known / self._place.pipelines

    def _trainable(self) -> frozenset[str]:
        return frozenset(name for name, each in self._stage.named_parameters() if each.requires_grad)
