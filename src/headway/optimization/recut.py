"""Pipelines that the recorded script does not train: of a model in one piece, or with its stages split otherwise.

They are replayed as every candidate is, and are less certain. A script follows them only if it is changed.
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

SPLITS = 3  # that are replayed of each number of stages
TIE = 0.01
Replicated = DistributedDataParallelStrategy | DecoupledStrategy
DDP = DistributedDataParallelStrategy()
NOT_SHARED = ("zero-bubble", "recorded")
"""Orders that are not for other stages: not all modules permit halved backwards, and none runs as it was recorded."""
LEAST_GAIN = 0.02  # of a step, for which stages are said to be worth another split


@dataclass(frozen=True)
class Recut:
    """A pipeline that the script as it is does not train: ``simulation`` is its replay, ``name`` says what it is.

    ``strategy`` has the ``split_points``, ``job`` the stages and the mesh.
    """

    name: str
    strategy: Strategy
    job: Job
    simulation: Simulation
    change: str


@dataclass(frozen=True)
class Recuts:
    """The pipelines found, and what is to be said of them, or of why there are none."""

    found: tuple[Recut, ...] = ()
    notes: tuple[str, ...] = ()


def recuts(replayer: Replayer, so_far: Sequence[Strategy]) -> Recuts:
    """The pipelines that are worth a place among the candidates, which are ``so_far``, the fastest first."""
    if replayer.job.world_size == 1:
        return Recuts()
    if len(replayer.job.stages) == 1:
        return _of_one_piece(replayer)
    return _of_stages(replayer, so_far)


# A model in one piece ---------------------------------------------------------------------------------------


def _of_one_piece(replayer: Replayer) -> Recuts:
    trace, job = replayer.trace, replayer.job
    if why := why_not_cut(trace, job, replayer.recorded_strategy):
        said = f"Pipelines were not considered: {why}. headway predict compares them, from a model's layers"
        return Recuts(notes=(said,))
    recording = CutRecording(trace, job)
    found: list[Recut] = []
    for stages in (each for each in range(2, job.world_size + 1) if job.world_size % each == 0):
        found += _of_as_many(replayer, recording, stages)
    if not found and time_is_up():
        return Recuts()
    if not found:
        return Recuts(
            notes=("Pipelines were not considered: the model has too few modules that can be stages",)
        )
    notes = [
        "Pipelines need a script that calls headway.parallelize; they are rougher, as times are taken to be in "
        "proportion to the size of a micro-batch, and so is their memory (~)"
    ]
    if recording.chain.batch_norms:
        notes.append(
            "In a pipeline BatchNorm computes its statistics of micro-batches, which trains otherwise"
        )
    if any("shared" in each.change for each in found):
        notes.append("Messages for weights that stages share are not in the predictions")
    return Recuts(tuple(found), tuple(notes))


def _of_as_many(replayer: Replayer, recording: CutRecording, stages: int) -> Iterator[Recut]:
    """Pipelines of so many stages: 1F1B, and the order that is fastest, of the best split.

    Replicas of stages take the decoupled all-reduce where that is faster.
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
    first, cut, mesh, order = min(played, key=lambda each: each[0].step_ms)
    of = first.job
    replayer.may_be_slower(of, recording.slower(cut, count, mesh, order))
    points = tuple(layers[end].name for end in cut.ends[:-1])
    others = (
        candidate
        for candidate in candidates(of)
        if candidate.order not in ("1f1b", *NOT_SHARED) and not time_is_up()
    )
    simulations = [
        (plain, first),
        *((each, replayer.simulate(of, _composed(each, replicas))) for each in others),
    ]
    fastest = min(simulations, key=lambda each: each[1].step_ms)
    gains = fastest[1].step_ms < (1 - TIE) * first.step_ms
    shown: list[tuple[Replicated, PipelineStrategy, Simulation]]
    shown = [(DDP, *each) for each in ((fastest, simulations[0]) if gains else simulations[:1])]
    forms, _ = permitted_forms(job)
    if replicas > 1 and forms and not time_is_up():
        _, order_of_best, best = shown[0]
        decoupled = DecoupledStrategy(gather=forms[0])
        apart = replayer.simulate(of, _composed(order_of_best, replicas, decoupled))
        if apart.step_ms < (1 - TIE) * best.step_ms:
            shown.insert(0, (decoupled, order_of_best, apart))
    for data, strategy, simulation in shown:
        cut_there = _composed(strategy.model_copy(update={"split_points": points}), replicas, data)
        change = f"the model cut at {', '.join(points)}"
        if tied_bytes(recording.model, cut):
            change += ", with weights that are shared"
        if list(order) != sorted(order):
            change += f", on hosts {', '.join(job.on.hosts[host].name for host in order)} in this order"
        said = _composed(strategy, replicas, data).describe()
        name = f"{stages} stages{f' x {replicas}' if replicas > 1 else ''}, {said}"
        yield Recut(name, cut_there, of, simulation, change)


def _composed(pipeline: PipelineStrategy, replicas: int, data: Replicated = DDP) -> Strategy:
    return pipeline if replicas == 1 else MeshStrategy(pipeline=pipeline, data=data)


# Stages -----------------------------------------------------------------------------------------------------


def _of_stages(replayer: Replayer, so_far: Sequence[Strategy]) -> Recuts:
    links = stage_links(replayer.trace, replayer.job)
    if isinstance(links, str):
        return Recuts(notes=(f"Other splits of layers over stages were not considered: {links}",))
    orders = (each for each in so_far if isinstance(each, PipelineStrategy) and each.order not in NOT_SHARED)
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
    simulation, ends = min(played, key=lambda each: each[0].step_ms)
    gain = 1 - simulation.step_ms / now.step_ms
    if gain < LEAST_GAIN:
        return Recuts()
    said = (
        f"Moving {links.moves(ends)} would make a step of {best.describe()} {gain:.0%} faster; the script has to build "
        "its stages so, headway run cannot"
    )
    if not links.named:
        unnamed = "Modules of different stages have the same names: no plan can name such a split"
        return Recuts(notes=(f"{said}. {unnamed}",))
    strategy = best.model_copy(update={"split_points": links.points(ends)})
    name = f"{best.describe()}, stages split anew"
    change = f"stages begin at {', '.join(strategy.split_points)}"
    return Recuts((Recut(name, strategy, simulation.job, simulation, change),), (said,))
