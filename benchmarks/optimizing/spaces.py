"""Small spaces of plans, of which a replay of every single one finds the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from headway.collectives.algorithms import HIERARCHICAL
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import RINGS, Algorithms
from headway.graph.step_layout import profile_of
from headway.job import Job
from headway.model import ModelSpec
from headway.scheduling.buckets import GATHER_MODES, Part, whole_parameter
from headway.scheduling.fusion import Groups, bucket_caps_mb
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.planner.drafts import ScheduleDrafter, ScheduleOptions
from headway.strategies.decoupled.planner.surrogate import Predictor
from headway.strategies.decoupled.policy import strategy_of
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_times import micro_batches

CHANNELS = (1, 2)
EARLY_GATHERS = (None, 0.0, 0.5, 1.0)  # by the planner's thresholds
ORDERS = ("eager-1f1b", "zero-bubble", "gpipe")


def space_of(job: Job, runs: int) -> list[Strategy]:
    """Every plan of the space for ``job``; see ``data_parallel_space`` and ``pipeline_space``."""
    return pipeline_space(micro_batches(job.steps)) if len(job.stages) > 1 else data_parallel_space(job, runs)


def data_parallel_space(job: Job, runs: int) -> list[Strategy]:
    """Every way to make buckets of whole ``runs`` of parameters, in the order in which gradients become ready.

    Each as DDP's all-reduces, and decoupled, gathering parameters, or gradients as early as the planner has them, on
    one channel or two, by rings, and where hosts have several workers by hierarchical ones.
    """
    hosts = Hosts.of_cluster(job.on)
    several = hosts.are_alike and 1 < len(hosts.ranks) < job.world_size
    profile = profile_of(job.steps.timelines)
    drafters = [
        ScheduleDrafter(Predictor(job.model, profile, job.on, algorithms))
        for algorithms in (RINGS, *((Algorithms(HIERARCHICAL, HIERARCHICAL),) if several else ()))
    ]
    options = [
        ScheduleOptions(form, channels, early)
        for form in GATHER_MODES
        for channels in CHANNELS
        for early in (EARLY_GATHERS if form == "gradients" else (None,))
    ]
    found: dict[Strategy, None] = {}
    for groups in bucketings(job.model, runs):
        found[DistributedDataParallelStrategy(bucket_caps_mb=bucket_caps_mb(groups, job.model))] = None
        for drafter in drafters:
            drafted = drafter.groups(groups)
            for each in options:
                found[strategy_of(drafter.schedule(drafted, each), job.model)] = None
    return list(found)


def pipeline_space(count: int) -> list[Strategy]:
    """Groups of every size, with as many receive buffers or twice as many, and the other orders."""
    groups = [
        PipelineStrategy(order="kfkb", group_size=size, micro_batches=count, receive_buffers=buffers)
        for size in range(1, count + 1)
        for buffers in dict.fromkeys((None, 2 * size))
    ]
    others = [PipelineStrategy.model_validate({"order": order, "micro_batches": count}) for order in ORDERS]
    return [*groups, *others]


def bucketings(model: ModelSpec, runs: int) -> Iterator[Groups]:
    """Every division of the model into buckets of neighbouring runs."""
    found = runs_of(model, runs)
    for ends in ends_of_groups(len(found)):
        begins = (0, *ends[:-1])
        yield [
            [part for run in found[begin:end] for part in run]
            for begin, end in zip(begins, ends, strict=True)
        ]


def ends_of_groups(count: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide ``count`` things in a row into groups, each by where its groups end."""
    for cuts in product((False, True), repeat=count - 1):
        yield (*(place for place, cut in enumerate(cuts, start=1) if cut), count)


def runs_of(model: ModelSpec, count: int) -> Groups:
    """At most ``count`` runs of whole parameters of about as many bytes, as their gradients become ready."""
    found: dict[int, list[Part]] = {}
    passed = 0
    for parameter in model.ready_parameters():
        found.setdefault(passed * count // model.size_bytes, []).append(whole_parameter(parameter))
        passed += parameter.size_bytes
    return list(found.values())


def describe(strategies: Sequence[Strategy]) -> str:
    """Of what kinds they are."""
    names = [strategy.name for strategy in strategies]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
