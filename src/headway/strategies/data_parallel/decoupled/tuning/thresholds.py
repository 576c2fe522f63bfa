"""DeAR's search for a bucket size (arXiv 2302.12445) as a proposer: a baseline, tried by the same driver."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from headway.errors import UserError
from headway.planning.bayesian import ThresholdSearch
from headway.scheduling import fusion
from headway.scheduling.buckets import BucketSchedule, GatherMode, forward_gather_order, make_buckets
from headway.strategies.data_parallel.decoupled.tuning.proposals import Candidate, Setting, Trial


class ThresholdProposer:
    """Groups of whole modules in the reverse order of registration, up to a threshold that a Bayesian search chooses.

    ``options`` are those of ``ThresholdSearch``. As published, gradients are gathered, on one channel.

    Raises UserError where the library ``bayesian-optimization`` is missing.
    """

    learns = False

    def __init__(self, *, gather: GatherMode = "gradients", channels: int = 1, **options: Any) -> None:
        if importlib.util.find_spec("bayes_opt") is None:  # asked on every rank, though only rank 0 searches
            raise UserError(
                "the Bayesian search needs the library bayesian-optimization",
                fix="pip install 'headway[tuning]'",
            )
        self._gather: GatherMode = gather
        self._channels = channels
        self._options = options
        self._search: ThresholdSearch | None = None
        self._setting: Setting | None = None
        self._threshold_mb = 0.0

    def begin(self, setting: Setting) -> None:
        """Search anew."""
        share = setting.agreement.number_from_rank_0
        self._search = ThresholdSearch(rank=setting.agreement.rank, share=share, **self._options)
        self._setting = setting

    def propose(self) -> Candidate | None:
        """The schedule of the next threshold."""
        assert self._search is not None
        assert self._setting is not None
        if self._search.done:
            return None
        self._threshold_mb = self._search.ask()
        model = self._setting.model
        cap_bytes = max(1, round(self._threshold_mb * fusion.MIB))
        buckets = make_buckets(fusion.registration(model, cap_bytes), model)
        schedule = BucketSchedule(
            buckets, forward_gather_order(model, buckets), self._gather, min(self._channels, self._setting.channels)
        )  # fmt: skip
        return Candidate.of(f"threshold of {self._threshold_mb:.4g} MB", schedule, model)

    def tell(self, candidate: Candidate, measured_ms: float) -> None:
        """Hand the time on to the search."""
        assert self._search is not None
        self._search.tell(self._threshold_mb, measured_ms / 1e3)

    def choose(self, trials: Sequence[Trial]) -> int:
        """The quickest."""
        return min(range(len(trials)), key=lambda index: trials[index].measured_ms)
