"""The bound of a step: no plan that exchanges exact gradients in every step is replayed in less, whatever it decides.

It holds for all plans of synchronous data parallelism of one ``Form``, and the least over forms for all of them:
whatever buckets gradients are cut into and in whatever order they leave, decoupled or not, on however many
connections, over rings, trees, servers or hierarchies. It does not hold for plans that send something else than every
gradient in its own type (of fewer bits, of some elements, not in every step, or not to all), nor for pipelines, whose
ranks exchange something else; and it knows nothing of collectives that the script itself waits for, which only add to
a step.

Three things are looked at, each by itself, and the largest counts:

- **computation**: what the slowest rank computes in a step. The mean over ranks of a few steps may be less, as others
  may be nearer to it when these end than when they begin: by up to a step, but it is no less than what ranks compute
  on average;
- **dependencies**: a gradient arrives a latency after it is there at the earliest, and what is computed from then on,
  until the period ends (``periods``), follows it;
- **links**: over each cut of the cluster (``cuts``) all bytes pass between the moments at which they are there and
  those at which they are needed, at the rate of its links, and what these have saved up. Communication is cut as finely
  as one likes and costs nothing but its bytes. Over all steps together, links pass no more than their rate and what
  they had saved up before the first of them: a burst that is spent in every step has to be saved up in every step.

Where ranks compute differently, links and dependencies are those of a rank that is as fast as the fastest in all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headway.graph.computation import Part, Timeline
from headway.job import Job
from headway.planning.bound.cuts import Cut, cuts_of, least_byte_factor
from headway.planning.bound.lateness import Work, least_lateness
from headway.planning.bound.periods import Form, Period
from headway.planning.bound.ranks import Ranks, ranks_of
from headway.scheduling.buckets import BucketSchedule

COMPUTATION, LATENCY = "computation", "latency"
STEPS_AHEAD = 1  # of the slowest rank: by as many may others come closer to it, or get away from it


@dataclass(frozen=True, slots=True)
class StepBound:
    """The bound of a mean step, in nanoseconds, and what it is made of.

    ``parts_ns`` has what each of the computation, the latency, and the cuts of the cluster by itself leaves of it, by
    name. ``step_ns`` is no less than any of them, and more where they take turns from step to step.
    """

    step_ns: float
    parts_ns: Mapping[str, float] = field(hash=False)

    @property
    def step_ms(self) -> float:
        """The bound in ms."""
        return self.step_ns / 1e6

    @property
    def binds(self) -> str:
        """The name of what is largest: ``computation``, ``latency``, or the links of a cut."""
        return max(self.parts_ns, key=self.parts_ns.__getitem__)

    @property
    def reason(self) -> str:
        """Why a step cannot be shorter, in a sentence."""
        computation = f"computation alone takes {self.parts_ns[COMPUTATION] / 1e6:.1f} ms"
        if self.binds == COMPUTATION:
            return f"By this recording, no plan can be faster, as {computation}."
        if self.binds == LATENCY:
            why = "gradients arrive a latency later than they are there"
            return f"By this recording, no plan can be faster, as {why}; {computation}."
        return f"By this recording, no plan can be faster, as all gradients have to pass {self.binds}; {computation}."

    def scaled(self, factor: float) -> StepBound:
        """The bound of a step of which everything takes so many times as long."""
        return StepBound(
            self.step_ns * factor, {name: part_ns * factor for name, part_ns in self.parts_ns.items()}
        )

    def distance(self, step_ms: float) -> str:
        """How far a step is from it, in a sentence."""
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
    """The bound of the mean step of ``job``, whose model is not cut into stages, under plans of one ``form``.

    It holds for the mean of its steps as they are replayed; with ``steps`` for the mean of so many like them: the more
    there are, the less does it matter what links had saved up before, and how far ranks may get ahead of others
    (``math.inf``: not at all). ``sent_share`` is for plans that send every gradient in no less than that share of its
    bytes. With ``schedule`` it is the bound of its buckets alone, none of which leaves before it is full. ``ranks`` are
    those of the job under this form, if they are known. With ``cut_name`` only the cut of this name is looked at,
    which takes a fraction of the time.
    """
    ranks = ranks_of(job, form) if ranks is None else ranks
    fastest = ranks.fastest if schedule is None else _bucketed(ranks.fastest, schedule)
    recorded = len(next(iter(job.steps.timelines.values())))
    count = recorded if steps is None else steps
    edges_ns = ranks.edges_ns / count

    if fastest and form != "all-reduce" and count < math.inf and _warm_up_waits_for_more(job):
        first, *others = fastest
        fastest = [replace(first, released_ns={}, after_ns={}), *others]

    def mean_ns(periods_ns: Iterable[float]) -> float:
        return sum(periods_ns) / recorded + edges_ns

    slowest_ns = ranks.slowest_ns / recorded * (1 - STEPS_AHEAD / count)
    parts_ns = {COMPUTATION: max(ranks.mean_ns / recorded, slowest_ns)}
    cuts = [each for each in cuts_of(job.on) if cut_name in (None, each.name)]
    if not cuts or not fastest:
        return StepBound(parts_ns[COMPUTATION], parts_ns)
    latency_ns = min(cut.latency_ns for cut in cuts)
    parts_ns[LATENCY] = mean_ns(_dependent_ns(each, latency_ns) for each in fastest)
    factor = least_byte_factor(job.on) * sent_share
    sizes = {name: each.size_bytes * factor for name, each in job.model.by_name.items()}
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
    """The same where a gradient is there when the bucket that it is in is full, or of several the first that is."""
    return [replace(period, released_ns=_full_ns(period.released_ns, schedule)) for period in periods]


def _full_ns(released_ns: Mapping[str, float], schedule: BucketSchedule) -> dict[str, float]:
    full_ns: dict[str, float] = {}
    for bucket in schedule.buckets:
        names = [name for name in bucket.parameters if name in released_ns]
        last_ns = max((released_ns[name] for name in names), default=0.0)
        full_ns |= {name: min(last_ns, full_ns.get(name, last_ns)) for name in names}
    return {name: full_ns.get(name, own_ns) for name, own_ns in released_ns.items()}


def _dependent_ns(period: Period, latency_ns: float) -> float:
    """How long a period is at least if bytes cost nothing."""
    chains_ns = (
        released_ns + latency_ns + period.after_ns[name] for name, released_ns in period.released_ns.items()
    )
    return max(period.computation_ns, *chains_ns, 0.0)


def _passing_ns(period: Period, cut: Cut, sizes: Mapping[str, float]) -> float:
    """How long a period is at least if all of its gradients have to pass ``cut``."""
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
