"""The bound of one plan by itself: what its replay cannot be faster than, for a fraction of the time that takes."""

from __future__ import annotations

from headway.collectives.algorithms import REDUCE_SCATTER
from headway.job import Job
from headway.planning.bound.periods import Form
from headway.planning.bound.ranks import Ranks, ranks_of
from headway.planning.bound.step_bound import COMPUTATION, LATENCY, StepBound, bound_of
from headway.scheduling.buckets import BucketSchedule


class OwnBounds:
    """Bounds of the schedules of one job, whose model is not cut into stages.

    Of each only that cut of the cluster is looked at that binds most where nothing is known of buckets.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ranks: dict[Form, Ranks] = {}
        self._of_form: dict[tuple[Form, float], StepBound] = {}

    def of(self, schedule: BucketSchedule) -> StepBound:
        """The bound of the mean step under ``schedule``, for whatever strategy has decided it."""
        form, share = form_of(schedule), least_sent_share(schedule)
        if form not in self._ranks:
            self._ranks[form] = ranks_of(self._job, form)
        ranks = self._ranks[form]
        if (form, share) not in self._of_form:
            self._of_form[form, share] = bound_of(self._job, form, sent_share=share, ranks=ranks)
        known = self._of_form[form, share]
        cuts = [name for name in known.parts_ns if name not in (COMPUTATION, LATENCY)]
        if not cuts:
            return known
        cut = max(cuts, key=known.parts_ns.__getitem__)
        own = bound_of(self._job, form, sent_share=share, schedule=schedule, ranks=ranks, cut_name=cut)
        return max(known, own, key=lambda each: each.step_ns)


def form_of(schedule: BucketSchedule) -> Form:
    """When ``schedule`` has gradients needed: those without gathers are all-reduces."""
    return schedule.gather if schedule.gather_order else "all-reduce"


def least_sent_share(schedule: BucketSchedule) -> float:
    """The least share of its bytes in which any of its buckets is sent; no more than 1."""
    if schedule.halves is None:
        sent = ((bucket.all_reduced_bytes, bucket.size_bytes) for bucket in schedule.buckets)
    else:
        sent = ((schedule.half_bytes(REDUCE_SCATTER, each), each.size_bytes) for each in schedule.buckets)
    return min(1.0, min((part / whole for part, whole in sent if whole), default=1.0))
