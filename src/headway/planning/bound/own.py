"""Bounds single plans: no replay of a plan is faster than its bound, which takes far less time to compute."""

from __future__ import annotations

from headway.collectives.algorithms import REDUCE_SCATTER
from headway.job import Job
from headway.planning.bound.periods import Form
from headway.planning.bound.ranks import Ranks, ranks_of
from headway.planning.bound.step_bound import COMPUTATION, LATENCY, StepBound, bound_of
from headway.scheduling.buckets import BucketSchedule


class PlanBounds:
    """Computes bounds for the schedules of one job without pipeline stages.

    For each schedule, only considers the cut of the cluster that binds most for unknown buckets.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ranks: dict[Form, Ranks] = {}
        self._of_form: dict[tuple[Form, float], StepBound] = {}

    def of(self, schedule: BucketSchedule) -> StepBound:
        """The bound of the mean step under ``schedule``, for any strategy that decides it."""
        form, share = form_of(schedule), least_sent_share(schedule)
        if form not in self._ranks:
            self._ranks[form] = ranks_of(self._job, form)
        ranks = self._ranks[form]
        if (form, share) not in self._of_form:
            self._of_form[form, share] = bound_of(self._job, form, sent_share=share, ranks=ranks)
        form_bound = self._of_form[form, share]
        cuts = [name for name in form_bound.parts_ns if name not in (COMPUTATION, LATENCY)]
        if not cuts:
            return form_bound
        cut = max(cuts, key=form_bound.parts_ns.__getitem__)
        plan_bound = bound_of(self._job, form, sent_share=share, schedule=schedule, ranks=ranks, cut_name=cut)
        return max(form_bound, plan_bound, key=lambda bound: bound.step_ns)


def form_of(schedule: BucketSchedule) -> Form:
    """When ``schedule`` needs gradients; without gathers, it uses all-reduces."""
    return schedule.gather if schedule.gather_order else "all-reduce"


def least_sent_share(schedule: BucketSchedule) -> float:
    """The least sent share of bytes over all buckets, at most 1."""
    if schedule.halves is None:
        sent = ((bucket.all_reduced_bytes, bucket.size_bytes) for bucket in schedule.buckets)
    else:
        sent = (
            (schedule.half_bytes(REDUCE_SCATTER, bucket), bucket.size_bytes) for bucket in schedule.buckets
        )
    return min(1.0, min((part / total for part, total in sent if total), default=1.0))
