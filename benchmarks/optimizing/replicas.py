"""One rank of a data-parallel case: stock DDP, plans, and the settings of DDP that are searched."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from paced_training.cases import RealCase
from paced_training.jobs import paced_job, real_job
from paced_training.measuring import disagreement
from paced_training.planned import Planned
from paced_training.stock import DEFAULT_CAPS_MB, Ddp
from paced_training.trainer import Trainer, held_bytes

from headway.plan import Plan
from optimizing.cases import DataParallelCase
from optimizing.stock_search import DdpOptions, StockSearch, first_ddp_options, near_ddp_options


class Replicas:
    """What a rank of ``case`` can train."""

    def __init__(self, case: DataParallelCase, *, quick: bool) -> None:
        model = case.model
        self._job = (
            real_job(model.model, dist.get_rank())
            if isinstance(model, RealCase)
            else paced_job(model.plan(quick=quick), dist.get_rank())
        )

    def default(self) -> Trainer:
        """Stock DDP as it comes; its bucket sizes are scaled as the model is."""
        return Ddp(self._job, self._default_caps_mb, views=False)

    def stock(self, option: DdpOptions) -> Trainer:
        """Stock DDP with these settings."""
        return Ddp(self._job, option.caps_mb, views=option.views, static_graph=option.static_graph)

    def planned(self, plan: Plan) -> Trainer:
        """What ``headway.parallelize`` makes of a plan."""
        return Planned(self._job, plan)

    def search(self, given: Sequence[Sequence[float]]) -> StockSearch[DdpOptions]:
        """The search among DDP's settings, which begins with usual caps and with the ``given`` lists of caps."""
        whole_mb = held_bytes(self._job.make().parameters()) / 2**20
        first = first_ddp_options(self._job.scale, whole_mb, self._default_caps_mb, given)
        return StockSearch(first, near_ddp_options)

    def disagreements(self, trainers: Sequence[Trainer]) -> list[float]:
        """How far the parameters of each are from those of the first, against the largest."""
        reference = trainers[0].values()
        return [disagreement(each.values(), reference) for each in trainers]

    @property
    def _default_caps_mb(self) -> tuple[float, ...]:
        return tuple(cap * self._job.scale for cap in DEFAULT_CAPS_MB)
