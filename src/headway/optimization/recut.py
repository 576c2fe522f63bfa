"""Proposes pipelines that the recorded script does not have: an unsplit model in stages, or other split points.

They are replayed like every candidate, but with more uncertainty. To run them, the script has to change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.job import Job
from headway.replayer.cut_recording import CutRecording, stage_links, why_not_cut
from headway.replayer.replayer import Replayer
from headway.simulator.simulate import Simulation
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.plugin import permitted_forms
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.pipeline.cut_job import passing, places, tied_bytes
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.plugin import candidates
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_times import Split
from headway.time_limit import time_is_up

SPLITS = 3  # replayed for each number of stages
TIE = 0.01
Replicated = DistributedDataParallelStrategy | DecoupledStrategy
DDP = DistributedDataParallelStrategy()
NOT_SHARED = ("zero-bubble", "recorded")
"""Orders not proposed for other stages: not every module can split its backward, and a recorded order is fixed."""
LEAST_GAIN = 0.02  # share of a step from which another split is worth mentioning


@dataclass(frozen=True)
class Recut:
    """A pipeline that the unmodified script does not train.

    ``simulation`` is its replay; ``strategy`` has the ``split_points``, ``job`` the stages and the mesh.
    """

    name: str
    strategy: Strategy
    job: Job
    simulation: Simulation
    change: str


@dataclass(frozen=True)
class Recuts:
    """The proposed pipelines, and notes about them or about why there are none."""

    pipelines: tuple[Recut, ...] = ()
    notes: tuple[str, ...] = ()


def recuts(replayer: Replayer, so_far: Sequence[Strategy]) -> Recuts:
    """The pipelines to add to the candidates; ``so_far`` are the strategies replayed already, fastest first."""
    if replayer.job.world_size == 1:
        return Recuts()
    if len(replayer.job.stages) == 1:
        return _of_unsplit_model(replayer)
    return _of_split_model(replayer, so_far)


def _of_unsplit_model(replayer: Replayer) -> Recuts:
    trace, job = replayer.trace, replayer.job
    if why := why_not_cut(trace, job, replayer.recorded_strategy):
        note = (
            f"Pipelines were not considered: {why}. headway predict can compare them from the model's layers"
        )
        return Recuts(notes=(note,))
    recording = CutRecording(trace, job)
    pipelines: list[Recut] = []
    for stages in (divisor for divisor in range(2, job.world_size + 1) if job.world_size % divisor == 0):
        pipelines += _with_stages(replayer, recording, stages)
    if not pipelines and time_is_up():
        return Recuts()
    if not pipelines:
        return Recuts(notes=("Pipelines were not considered: too few modules of the model can be stages",))
    notes = [
        "Pipelines need a script that calls headway.parallelize. Their times and memory (~) are rough: they assume "
        "cost proportional to the size of a micro-batch"
    ]
    if recording.chain.batch_norms:
        notes.append("In a pipeline, BatchNorm computes statistics per micro-batch, which changes training")
    if any("shared" in divisor.change for divisor in pipelines):
        notes.append("Predictions leave out the messages for weights that stages share")
    return Recuts(tuple(pipelines), tuple(notes))


def _with_stages(replayer: Replayer, recording: CutRecording, stages: int) -> Iterator[Recut]:
    """Pipelines with ``stages`` stages at the best split: 1F1B, and the fastest order if it gains more.

    Replicas of stages use the decoupled all-reduce if that is faster.
    """
    job = recording.job
    replicas, count = job.world_size // stages, recording.micro_batches(stages)
    layers = recording.split_layers(stages, count)
    if count < 2 or sum(layer.cut_bytes is not None for layer in layers) < stages - 1:
        return
    plain = PipelineStrategy(micro_batches=count)
    played: list[tuple[Simulation, Split, dict[str, int], tuple[int, ...]]] = []
    for mesh, order in places(job.on, layers, stages, replicas, count):
        for split in recording.splits(layers, count, mesh, order, SPLITS):
            if time_is_up():
                return
            of = recording.cut(split, count, mesh, order)
            played.append((replayer.simulate(of, _composed(plain, replicas)), split, mesh, order))
    if not played:
        return
    first, cut, mesh, order = min(played, key=lambda result: result[0].step_ms)
    of = first.job
    replayer.may_be_slower(of, recording.slower(cut, count, mesh, order))
    points = tuple(layers[end].name for end in cut.ends[:-1])
    other_orders = (
        candidate
        for candidate in candidates(of)
        if candidate.order not in ("1f1b", *NOT_SHARED) and not time_is_up()
    )
    simulations = [
        (plain, first),
        *((pipeline, replayer.simulate(of, _composed(pipeline, replicas))) for pipeline in other_orders),
    ]
    fastest = min(simulations, key=lambda result: result[1].step_ms)
    gains = fastest[1].step_ms < (1 - TIE) * first.step_ms
    shown: list[tuple[Replicated, PipelineStrategy, Simulation]]
    shown = [(DDP, *entry) for entry in ((fastest, simulations[0]) if gains else simulations[:1])]
    forms, _ = permitted_forms(job)
    if replicas > 1 and forms and not time_is_up():
        _, order_of_best, best = shown[0]
        decoupled = DecoupledStrategy(gather=forms[0])
        apart = replayer.simulate(of, _composed(order_of_best, replicas, decoupled))
        if apart.step_ms < (1 - TIE) * best.step_ms:
            shown.insert(0, (decoupled, order_of_best, apart))
    for data, strategy, simulation in shown:
        cut_there = _composed(strategy.model_copy(update={"split_points": points}), replicas, data)
        change = f"the model split at {', '.join(points)}"
        if tied_bytes(recording.model, cut):
            change += ", with shared weights"
        if list(order) != sorted(order):
            change += f", on hosts {', '.join(job.on.hosts[host].name for host in order)} in this order"
        description = _composed(strategy, replicas, data).describe()
        name = f"{stages} stages{f' x {replicas}' if replicas > 1 else ''}, {description}"
        yield Recut(name, cut_there, of, simulation, change)


def _composed(pipeline: PipelineStrategy, replicas: int, data: Replicated = DDP) -> Strategy:
    return pipeline if replicas == 1 else MeshStrategy(pipeline=pipeline, data=data)


def _of_split_model(replayer: Replayer, so_far: Sequence[Strategy]) -> Recuts:
    links = stage_links(replayer.trace, replayer.job)
    if isinstance(links, str):
        return Recuts(notes=(f"Other split points were not considered: {links}",))
    orders = (
        strategy_so_far
        for strategy_so_far in so_far
        if isinstance(strategy_so_far, PipelineStrategy) and strategy_so_far.order not in NOT_SHARED
    )
    if (best := next(orders, None)) is None:
        return Recuts()
    job, now = replayer.job, replayer.replay(best)
    ranks = [replayer.trace.ranks_of_stages[stage][0] for stage in range(len(job.stages))]
    count = best.decide(job).micro_batches
    played = [
        (replayer.simulate(links.resplit(job, split.ends), best), split.ends)
        for split in links.splits(count, passing(job.on, ranks))
        if split.ends != links.ends and not time_is_up()
    ]
    if not played:
        return Recuts()
    simulation, ends = min(played, key=lambda strategy_so_far: strategy_so_far[0].step_ms)
    gain = 1 - simulation.step_ms / now.step_ms
    if gain < LEAST_GAIN:
        return Recuts()
    note = (
        f"Moving {links.moves(ends)} would make a step of {best.describe()} {gain:.0%} faster; change the script to "
        "build its stages that way (headway run cannot)"
    )
    if not links.named:
        unnamed = "Modules of different stages have the same names, so no plan can describe this split"
        return Recuts(notes=(f"{note}. {unnamed}",))
    strategy = best.model_copy(update={"split_points": links.points(ends)})
    name = f"{best.describe()}, other split points"
    change = f"split points {', '.join(strategy.split_points)}"
    return Recuts((Recut(name, strategy, simulation.job, simulation, change),), (note,))
