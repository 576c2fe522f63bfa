"""Averaging at the end of a period: one all-reduce of everything that is averaged, then perhaps an outer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from headway.errors import CommunicationError, UserError, one_line
from headway.strategies.live.averaged import Flat, Layout
from headway.strategies.live.channels.wiring import Wiring
from headway.strategies.live.checksum import checksum
from headway_baselines.local_sgd.outer import OuterOptimizer
from headway_baselines.local_sgd.schedule import PeriodicSchedule

PERIOD_ENDS, FINISHES = 0, 1
WHY = ("the end of a period", "finish()")


class PeriodicAveraging:
    """Averages what a ``Layout`` describes over the ranks of ``group``, in their flat copy.

    An outer optimizer begins with the parameters that ``begun_with`` has, the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, wiring: Wiring, schedule: PeriodicSchedule, begun_with: Layout
    ) -> None:
        self._group, self._wiring, self._schedule = group, wiring, schedule
        self._flat = begun_with.empty(wiring.buffers)
        self.outer: OuterOptimizer | None = None
        self._begun_with = 0  # a checksum of what the outer optimizer was given to begin with
        self.begin(begun_with)

    def begin(self, begun_with: Layout) -> bool:
        """Have the period begin with the parameters of ``begun_with``; whether that is another beginning.

        An outer optimizer has no momentum then. Ranks that are given different ones raise at the next average.
        """
        if self._schedule.outer is None:
            return False
        given = begun_with.empty(self._wiring.buffers)
        begun_with.read(given)
        if self.outer is not None and self.outer.begins_with(given.wholes):
            return False
        self.outer = OuterOptimizer(self._schedule.outer, given.wholes)
        self._begun_with = checksum(given.wholes)
        return True

    def go_on(self, outer: Mapping[str, Any]) -> None:
        """Go on from what ``outer.state_dict()`` was. Raises UserError where it is of another model."""
        assert self.outer is not None
        self.outer.load_state_dict(outer)
        self._begun_with = 0

    def average(self, layout: Layout, iteration: int, why: int, *, apart: bool) -> None:
        """Make one model of all ranks' after ``iteration`` steps of each, if they are ``apart``. Collective.

        Raises UserError on all ranks where they do not come with the same number of steps or tensors,
        CommunicationError where one of them does not come.
        """
        try:
            self._agree(layout, iteration, why)
            if not apart:
                return
            if not layout.fits(self._flat):
                self._flat = layout.empty(self._wiring.buffers)
            layout.read(self._flat)
            for whole in self._flat.wholes:
                dist.all_reduce(whole, group=self._group)
                whole.div_(dist.get_world_size(self._group))
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {dist.get_rank()}: the average after step {iteration} failed: {one_line(str(error), 200)}. "
                "A peer ended or fell silent: its own output says why. Restart the job from its last checkpoint."
            ) from error
        if self.outer is not None:
            self.outer.step(parameters_of(layout, self._flat))
        layout.write(self._flat)

    def _agree(self, layout: Layout, iteration: int, why: int) -> None:
        """See that all ranks are about to average the same, each before it changes anything."""
        mine = torch.tensor(
            [why, iteration, int(layout.digest[:14], 16), self._begun_with],
            dtype=torch.int64,
            device=self._wiring.messages,
        )
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyones, mine, group=self._group)
        said: list[list[Any]] = [each.tolist() for each in everyones]
        for rank, (their_why, their_iteration, digest, begun_with) in enumerate(said):
            if (their_why, their_iteration) != (said[0][0], said[0][1]):
                raise UserError(
                    "ranks have not made the same number of steps under local SGD",
                    got=f"rank 0 at {WHY[said[0][0]]} after {said[0][1]} steps, rank {rank} at {WHY[their_why]} after "
                    f"{their_iteration}",
                    expected="as many steps on every rank",
                    fix="Give every rank as many batches, as DistributedSampler(drop_last=True) does.",
                )
            if digest != said[0][2]:
                raise UserError(
                    "ranks do not average the same tensors", got=f"rank {rank} differs from rank 0",
                    expected="the same model, parameters that require gradients and optimizer",
                )  # fmt: skip
            if begun_with != said[0][3]:
                raise UserError(
                    "ranks did not begin this period of DiLoCo with the same parameters",
                    got=f"rank {rank} differs from rank 0", expected="the same state, loaded on every rank",
                    fix="Load it on all ranks, before the first step or where a period ends.",
                )  # fmt: skip


def parameters_of(layout: Layout, flat: Flat) -> Sequence[torch.Tensor]:
    """The parts of ``flat`` that parameters lie in: of each dtype they are first."""
    sizes = dict.fromkeys(layout.sizes, 0)
    for each in layout.tensors:
        sizes[each.wire] += each.numel * each.is_parameter
    return [whole[: sizes[whole.dtype]] for whole in flat.wholes if sizes[whole.dtype]]
