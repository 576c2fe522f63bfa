"""The yardstick of a search: every plan of a small space, each replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from headway.errors import UserError
from headway.job import Job
from headway.model import ParameterSpec
from headway.network.algorithm_choices import algorithm_choices
from headway.network.link_cost import LinkCosts
from headway.scheduling.buckets import GATHER_MODES, GatherMode, whole_parameter
from headway.scheduling.fusion import bucket_caps_mb
from headway.simulator.simulate import Simulator
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy

MOST_PARAMETERS = 10


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The best plan of a space of ``plans``, and its step."""

    best: Strategy
    step_ms: float
    plans: int


def every_plan(
    job: Job, *, forms: Sequence[GatherMode] = GATHER_MODES, channels: Sequence[int] = (1, 2)
) -> Iterator[Strategy]:
    """Every plan of whole parameters in runs of the order in which they become ready.

    DDP with these buckets, and the decoupled all-reduce with them, in each of ``forms``, on each number of
    ``channels``, by each choice of algorithms that the planner considers. Gathers come in the order in which forward
    needs them, all behind the last reduce-scatter. Raises UserError for more parameters than MOST_PARAMETERS, of which
    there would be too many, and for several types.
    """
    parameters = job.model.ready_parameters()
    if len(parameters) > MOST_PARAMETERS or len({parameter.dtype for parameter in parameters}) > 1:
        raise UserError(
            "not every plan of this model can be tried", got=f"{len(parameters)} parameters",
            expected=f"at most {MOST_PARAMETERS}, of one type",
        )  # fmt: skip
    choices = algorithm_choices(LinkCosts(job.on), job.model.size_bytes)
    for runs in _in_runs(parameters):
        caps = bucket_caps_mb([[whole_parameter(each) for each in run] for run in runs], job.model)
        yield DistributedDataParallelStrategy(bucket_caps_mb=caps)
        for form in forms:
            for count in channels:
                for algorithms in choices:
                    yield DecoupledStrategy(
                        buckets=tuple(tuple(each.name for each in run) for run in runs), gather=form,
                        channels=count, reduce_scatter=algorithms.reduce_scatter, all_gather=algorithms.all_gather,
                        by_size=algorithms.by_size,
                    )  # fmt: skip


def best_of(strategies: Iterable[Strategy], step_ms: Callable[[Strategy], float]) -> Exhausted:
    """Try all of ``strategies``, of which there is at least one, and return the first of the fastest."""
    best: tuple[float, Strategy] | None = None
    plans = 0
    for plans, strategy in enumerate(strategies, start=1):  # noqa: B007 - their number
        taken_ms = step_ms(strategy)
        if best is None or taken_ms < best[0]:
            best = taken_ms, strategy
    assert best is not None
    return Exhausted(best[1], best[0], plans)


def exhaust(job: Job, *, forms: Sequence[GatherMode] = GATHER_MODES) -> Exhausted:
    """The best of every plan of ``job``, by replay. Raises as ``every_plan`` does."""
    simulator = Simulator()
    return best_of(every_plan(job, forms=forms), lambda strategy: simulator.simulate(job, strategy).step_ms)


def _in_runs(parameters: Sequence[ParameterSpec]) -> Iterator[list[Sequence[ParameterSpec]]]:
    """Every way to cut a sequence into runs."""
    inner = range(1, len(parameters))
    for count in range(len(parameters)):
        for cuts in combinations(inner, count):
            yield [parameters[begin:end] for begin, end in pairwise((0, *cuts, len(parameters)))]
