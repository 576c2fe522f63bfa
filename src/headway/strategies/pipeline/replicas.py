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
        self._is_first_step = True
        self._trained = self._trainable()
        self.wrapped = stage
        if placement.replicas is not None and self._trained:
            assert replicate is not None, "replicas average gradients"
            self.wrapped = replicate(stage, placement.replicas)

    def begin_step(self, samples: int) -> None:
        """Every rank calls it before a step that trains, with how many ``samples`` its pipeline is given, if it knows.

        Raises UserError where other parameters are trained than were when the stage was wrapped; in the first step, on
        every rank, also where pipelines are given other numbers of samples.
        """
        if self._place.replicas is None:
            return
        if changed := self._trainable() ^ self._trained:
            raise UserError(
                "other parameters are trained than when the model was parallelized",
                got=f"requires_grad of {', '.join(sorted(changed)[:4])} was changed",
                fix="Freeze parameters before headway.parallelize, or call it again on a new model.",
            )
        if self._is_first_step:
            self.mean_of(torch.zeros((), dtype=torch.float64, device=self._device), samples)
        self._is_first_step = False
        self.share_buffers()

    def share_buffers(self) -> None:
        """Give every replica the buffers of the first pipeline's, as DistributedDataParallel does before a forward."""
        if self._place.replicas is None:
            return
        with torch.no_grad():
            for buffer in self._stage.buffers():
                dist.broadcast(buffer, self._place.ranks[0][self._place.stage], group=self._place.replicas)

    def mean_of(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        """The mean over pipelines of ``loss``, which their last ranks know, where the first have as many ``samples``.

        Raises UserError on every rank where they have other numbers: a mean over pipelines is that over samples only
        where each has as many.
        """
        counts = [0.0] * self._place.pipelines
        if self._place.is_first:
            counts[self._place.pipeline] = float(samples)
        known = loss if self._place.is_last else torch.zeros_like(loss)
        found = torch.cat([known.reshape(1), torch.tensor(counts, dtype=loss.dtype, device=loss.device)])
        dist.all_reduce(found)
        given = [int(each) for each in found[1:].tolist()]
        if len(set(given)) > 1:
            raise UserError(
                "pipelines were given batches of other sizes",
                got=", ".join(f"{each} samples" for each in given),
                expected="as many samples for each pipeline",
                fix="Give every pipeline as large a part of the batch (drop_last=True in a DataLoader).",
            )
        return found[0] / self._place.pipelines

    def _trainable(self) -> frozenset[str]:
        return frozenset(name for name, each in self._stage.named_parameters() if each.requires_grad)
