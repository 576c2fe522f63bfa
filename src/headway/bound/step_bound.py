"""Computes a lower bound of the replayed step for every plan that exchanges exact gradients in every step.

The bound holds for all plans of synchronous data parallelism of one ``Form``, and its least value over forms for all of
them: for any buckets, order, number of connections and algorithm, decoupled or not. It does not hold for plans that send
less than every gradient in its own type to all ranks in every step, nor for pipelines. It ignores collectives that the
script itself waits for, which only lengthen a step.

The bound is the largest of three:

- **computation**: of the slowest rank in a step. Over a few steps, the mean over ranks may be less, since faster ranks
  may catch up by as much as a step, but not less than the mean computation of ranks;
- **dependencies**: a gradient arrives at least one latency after it is ready, and the computation that needs it follows,
  until the period ends (``periods``);
- **links**: over each cut of the cluster (``cuts``), all bytes pass between when they are ready and when they are
  needed, at the rate of the links plus their saved-up burst. Communication is assumed perfectly divisible, at no cost but
  its bytes. Over all steps, links carry no more than their rate plus the first burst: a burst spent in every step must
  be saved up in every step.

If ranks differ, links and dependencies use a virtual rank that is as fast as the fastest in everything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.bound.cuts import Cut, cuts_of, least_byte_factor
from headway.bound.periods import Form, Period, Ranks, ranks_of
from headway.collectives.algorithms import REDUCE_SCATTER
from headway.graph.computation import Part, Timeline
from headway.job import Job
from headway.scheduling.buckets import BucketSchedule

Work = tuple[float, float, float]
"""Release time, due time, and duration on the link (ns)."""


def least_lateness(work: Iterable[Work]) -> float:
    """The least possible maximum lateness of ``work`` on one link; may be negative, and is -inf without work.

    With preemption on one link, earliest due date first is optimal (Horn, 1974). The result is the largest excess, over
    all intervals, of the work released and due within it over its length; so a burst that the link can carry once in any
    interval lowers the lateness by that much.
    """
    coming = sorted(work)
    latest = float("-inf")
    now = 0.0
    unfinished: list[tuple[float, float]] = []  # due time, remaining duration
    index = 0
    while index < len(coming) or unfinished:
        if not unfinished:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            _, due, length = coming[index]
            heapq.heappush(unfinished, (due, length))
            index += 1
        due, left = heapq.heappop(unfinished)
        until = coming[index][0] if index < len(coming) else float("inf")
        if now + left > until:
            heapq.heappush(unfinished, (due, left - (until - now)))
            now = until
        else:
            now += left
            latest = max(latest, now - due)
    return latest


COMPUTATION, LATENCY = "computation", "latency"
STEPS_AHEAD = 1  # by how many steps other ranks may approach the slowest one, or get ahead of it


@dataclass(frozen=True, slots=True)
class StepBound:
    """The lower bound of a mean step, in ns, and its parts.

    ``parts_ns`` has the bound from computation, from latency, and from each cut of the cluster alone, by name.
    ``step_ns`` is at least the largest of them, and more if they alternate between steps.
    """

    step_ns: float
    parts_ns: Mapping[str, float] = field(hash=False)

    @property
    def step_ms(self) -> float:
        """The bound in ms."""
        return self.step_ns / 1e6

    @property
    def binds(self) -> str:
        """The name of the largest part: ``computation``, ``latency``, or the links of a cut."""
        return max(self.parts_ns, key=self.parts_ns.__getitem__)

    @property
    def reason(self) -> str:
        """The reason for the bound, in one sentence."""
        computation = f"computation alone takes {self.parts_ns[COMPUTATION] / 1e6:.1f} ms"
        if self.binds == COMPUTATION:
            return f"By this recording, no plan can be faster, as {computation}."
        if self.binds == LATENCY:
            why = "gradients arrive one latency after they are ready"
            return f"By this recording, no plan can be faster, as {why}; {computation}."
        return f"By this recording, no plan can be faster, as all gradients have to pass {self.binds}; {computation}."

    def scaled(self, factor: float) -> StepBound:
        """The bound if everything takes ``factor`` times as long."""
        return StepBound(
            self.step_ns * factor, {name: part_ns * factor for name, part_ns in self.parts_ns.items()}
        )

    def distance(self, step_ms: float) -> str:
        """The distance of a step from the bound, in one sentence."""
        above = step_ms / self.step_ms - 1
        return f"{step_ms:.1f} ms is {above:.0%} above the bound of {self.step_ms:.1f} ms. {self.reason}"


def bound_of(
    job: Job,
    form: Form,
    *,
    steps: float | None = None,
    sent_share: float = 1.0,
    schedule: BucketSchedule | None = None,
    ranks: Ranks | None = None,
    cut_name: str | None = None,
) -> StepBound:
    """Bound the mean step of ``job`` (without pipeline stages) under all plans of one ``form``.

    The bound holds for the mean of the replayed steps, or of ``steps`` steps like them: over more steps, initial bursts
    and ranks that get ahead matter less (``math.inf``: not at all). ``sent_share`` is the least share of its bytes in
    which a plan sends a gradient. With ``schedule``, bounds its buckets alone, none of which leaves before it is full.
    ``ranks`` are those of the job under this form, if known. With ``cut_name``, only considers that cut, which is much
    faster.
    """
    ranks = ranks_of(job, form) if ranks is None else ranks
    fastest = ranks.fastest if schedule is None else _bucketed(ranks.fastest, schedule)
    recorded = len(next(iter(job.steps.timelines.values())))
    count = recorded if steps is None else steps
    edges_ns = ranks.edges_ns / count

    if fastest and form != "all-reduce" and count < math.inf and _warm_up_waits_for_more(job):
        first, *remaining = fastest
        fastest = [replace(first, released_ns={}, after_ns={}), *remaining]

    def mean_ns(periods_ns: Iterable[float]) -> float:
        return sum(periods_ns) / recorded + edges_ns

    slowest_ns = ranks.slowest_ns / recorded * (1 - STEPS_AHEAD / count)
    parts_ns = {COMPUTATION: max(ranks.mean_ns / recorded, slowest_ns)}
    cuts = [candidate for candidate in cuts_of(job.on) if cut_name in (None, candidate.name)]
    if not cuts or not fastest:
        return StepBound(parts_ns[COMPUTATION], parts_ns)
    latency_ns = min(cut.latency_ns for cut in cuts)
    parts_ns[LATENCY] = mean_ns(_dependent_ns(period, latency_ns) for period in fastest)
    factor = least_byte_factor(job.on) * sent_share
    sizes = {name: parameter.size_bytes * factor for name, parameter in job.model.by_name.items()}
    total_bytes = sum(sizes[name] for period in fastest for name in period.released_ns) / recorded
    longest_ns = [0.0] * len(fastest)
    for cut in cuts:
        each_ns = [_passing_ns(each, cut, sizes) for each in fastest]
        longest_ns = list(map(max, longest_ns, each_ns))
        refilled_ns = cut.time_ns(total_bytes) - cut.credit_ns / count + edges_ns
        parts_ns[cut.name] = max(parts_ns.get(cut.name, 0.0), mean_ns(each_ns), refilled_ns)
    return StepBound(max(*parts_ns.values(), mean_ns(longest_ns)), parts_ns)


def _warm_up_waits_for_more(job: Job) -> bool:
    """Whether the step before those that count, which is as the first of them, waits for more than the last one does.

    So it is where a script reads gradients or parameters in some steps, the first of them among these: then what the
    step before communicates may be over when those that count begin.
    """
    return any(not _reads(steps[0]) <= _reads(steps[-1]) for steps in job.steps.timelines.values())


def _reads(step: Timeline) -> set[tuple[str, tuple[str, ...]]]:
    return {(item.name, tuple(item.parameters)) for item in step.items if item.kind == Part.READ}


def _bucketed(periods: Sequence[Period], schedule: BucketSchedule) -> list[Period]:
    """The periods with each gradient released when its (first) bucket is full."""
    return [replace(period, released_ns=_full_ns(period.released_ns, schedule)) for period in periods]


def _full_ns(released_ns: Mapping[str, float], schedule: BucketSchedule) -> dict[str, float]:
    full_ns: dict[str, float] = {}
    for bucket in schedule.buckets:
        names = [name for name in bucket.parameters if name in released_ns]
        last_ns = max((released_ns[name] for name in names), default=0.0)
        full_ns |= {name: min(last_ns, full_ns.get(name, last_ns)) for name in names}
    return {name: full_ns.get(name, own_ns) for name, own_ns in released_ns.items()}


def _dependent_ns(period: Period, latency_ns: float) -> float:
    """The least length of a period if bytes cost nothing."""
    chains_ns = (
        released_ns + latency_ns + period.after_ns[name] for name, released_ns in period.released_ns.items()
    )
    return max(period.computation_ns, *chains_ns, 0.0)


def _passing_ns(period: Period, cut: Cut, sizes: Mapping[str, float]) -> float:
    """The least length of a period if all its gradients pass ``cut``."""
    work: list[Work] = []
    for name, released_ns in period.released_ns.items():
        due_ns = -cut.latency_ns - period.after_ns[name]  # counted from the end of the period
        length_ns = cut.time_ns(sizes[name])
        if period.halves and cut.in_halves:
            work.append((released_ns, due_ns, length_ns / 2))
            if period.step_ns is not None:
                work.append((max(released_ns, period.step_ns), due_ns, length_ns / 2))
        else:
            work.append((released_ns, due_ns, length_ns))
    return max(_dependent_ns(period, cut.latency_ns), least_lateness(work) - cut.credit_ns)


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
