"""Turns a data-parallel recording into the job of a pipeline, by splitting its model along the chain of modules.

The spans of each module in a recorded step give its share of forward and backward.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from headway.errors import PlanError
from headway.graph.computation import Part, Timeline
from headway.graph.step_layout import LayerTimes, profile_of
from headway.job import Job
from headway.model import Chain
from headway.scheduling.mesh import groups_along
from headway.strategies.base import DATA, PIPELINE, Strategy
from headway.strategies.pipeline.cut_job import (
    CutModel,
    LayerStep,
    cut_by_hand,
    cut_job,
    passing,
    reordered,
    split_layers,
)
from headway.strategies.pipeline.mesh import MeshStrategy
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.stage_links import StageLinks, why_not_split
from headway.strategies.pipeline.stage_times import Split, SplitLayer, split
from headway.strategies.registry import plugin_of
from headway.trace.events import Events, Kind
from headway.trace.format import Trace

MICRO_BATCHES_A_STAGE = 4
UNEQUAL = 1.1  # ratio of the slowest to the fastest rank's step from which devices count as different
NOT_SEEN = "the recording lacks the sizes of the activations between modules"


def why_not_cut(trace: Trace, job: Job, recorded: Strategy) -> str:
    """Why the recorded model cannot be split into pipeline stages; "" if it can."""
    chain = trace.model.chain
    if chain is None or trace.missing_ranks or not job.has_parameters:
        return NOT_SEEN
    if chain.why_not or len(chain.links) < 2:
        return chain.why_not or NOT_SEEN
    if trace.model.find_unused_parameters:
        return "some parameters have no gradient in some steps (find_unused_parameters)"
    if plugin_of(recorded).carries_over:
        return f"under {recorded.name}, times of modules include communication; record the job with ddp"
    for events in trace.events.values():
        passes = Counter(
            (row.step, row.kind) for row in events.of_kind(Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
        )
        if any(
            passes[step, kind] != 1
            for step in trace.steps
            for kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
        ):
            return "a step does not have exactly one forward and one backward"
        if any(_shares(chain, events, trace.steps) is None for events in trace.events.values()):
            return "the recorded modules did not run in the order of the chain"
    if not any(layer.cut_bytes for layer in _layers(chain, [0] * len(chain.links), [0] * len(chain.links))):
        return "there is no module after which it can be split"
    return ""


@dataclass(frozen=True)
class CutRecording:
    """A recorded job that can be split into stages (``why_not_cut`` returns "")."""

    trace: Trace
    job: Job

    @property
    def chain(self) -> Chain:
        """The chain of modules to split along."""
        assert self.trace.model.chain is not None
        return self.trace.model.chain

    @cached_property
    def model(self) -> CutModel:
        """The model, with every recorded step of every rank."""
        return CutModel(self.trace.model, self._steps.__getitem__, self.chain.aliases)

    @cached_property
    def _steps(self) -> Mapping[int, tuple[LayerStep, ...]]:
        steps = {}
        for rank, timelines in self.job.steps.timelines.items():
            shares = _shares(self.chain, self.trace.events[rank], self.trace.steps)
            assert shares is not None
            steps[rank] = tuple(_step(self.chain, timeline, *shares) for timeline in timelines)
        return steps

    def mean_layers(self) -> tuple[LayerTimes, ...]:
        """The layers with their times averaged over ranks and steps."""
        steps = [step.layers for rank_steps in self._steps.values() for step in rank_steps]
        forward, backward = (
            [
                sum(getattr(layers[place], name) for layers in steps) / len(steps)
                for place in range(len(steps[0]))
            ]
            for name in ("forward_ns", "backward_ns")
        )
        return _layers(self.chain, [round(ns) for ns in forward], [round(ns) for ns in backward])

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The relative speed of each rank (1 is the mean); all 1 if they differ by less than ``UNEQUAL``."""
        took_ns = [
            sum(layer.forward_ns + layer.backward_ns for step in rank_steps for layer in step.layers)
            / len(rank_steps)
            for _, rank_steps in sorted(self._steps.items())
        ]
        mean_ns = sum(took_ns) / len(took_ns)
        if max(took_ns) < UNEQUAL * min(took_ns):
            return (1.0,) * len(took_ns)
        return tuple(mean_ns / rank_ns for rank_ns in took_ns)

    def micro_batches(self, stages: int) -> int:
        """The number of micro-batches: four per stage, or fewer if the batch of all stages does not split evenly."""
        samples = stages * self.chain.samples
        return max(count for count in range(1, MICRO_BATCHES_A_STAGE * stages + 1) if samples % count == 0)

    def split_layers(self, stages: int, micro_batches: int) -> tuple[SplitLayer, ...]:
        """The layers of a micro-batch."""
        return split_layers(self.model, self.mean_layers(), stages / micro_batches)

    def splits(
        self,
        layers: Sequence[SplitLayer],
        micro_batches: int,
        mesh: Mapping[str, int],
        order: Sequence[int],
        keep: int,
    ) -> tuple[Split, ...]:
        """The most promising splits, with the hosts in ``order``."""
        cluster = reordered(self.job.on, order)
        ranks = groups_along(mesh, PIPELINE)[0]
        workers = self._workers(order)
        speeds = [self.speeds[workers[rank]] for rank in ranks]
        return split(layers, mesh[PIPELINE], micro_batches, passing(cluster, ranks), speeds=speeds, keep=keep)

    def cut(self, cut: Split, micro_batches: int, mesh: Mapping[str, int], order: Sequence[int] = ()) -> Job:
        """The job with these stages, with the hosts in ``order``."""
        return self._cut(self.model, cut, micro_batches, mesh, order)

    def slower(
        self, cut: Split, micro_batches: int, mesh: Mapping[str, int], order: Sequence[int] = ()
    ) -> Job:
        """The same job at its slowest: every module takes at least the time of the quickest recorded one.

        That is an upper limit for the fixed cost of calls, which the recording does not show.
        """

        def steps(worker: int) -> Sequence[LayerStep]:
            return [replace(step, layers=tuple(map(longer, step.layers))) for step in self._steps[worker]]

        def longer(layer: LayerTimes) -> LayerTimes:
            calls_ns = min(layer.forward_ns, self._calls_ns.get(layer.module, 0))
            of_backward = layer.backward_ns / max(1, layer.forward_ns)
            more_ns = calls_ns * (micro_batches / mesh[PIPELINE] - 1)
            return replace(
                layer,
                forward_ns=round(layer.forward_ns + more_ns),
                backward_ns=round(layer.backward_ns + more_ns * of_backward),
            )

        return self._cut(replace(self.model, steps=steps), cut, micro_batches, mesh, order)

    def _cut(
        self, model: CutModel, cut: Split, micro_batches: int, mesh: Mapping[str, int], order: Sequence[int]
    ) -> Job:
        cluster = reordered(self.job.on, order) if order else self.job.on
        return cut_job(model, cluster, cut, micro_batches, mesh, self._workers(order) if order else ())

    @cached_property
    def _calls_ns(self) -> Mapping[str, float]:
        """For each module of the chain, the time of its inner modules if each took as long as the quickest."""
        places = {link.name: place for place, link in enumerate(self.chain.links)}
        took_ns: dict[str, list[int]] = defaultdict(list)
        for row in self.trace.events[min(self.trace.events)].of_kind(Kind.FORWARD):
            took_ns[row.name].append(row.duration_ns)
        least_ns = min(median(durations_ns) for durations_ns in took_ns.values())
        counts = Counter(_place(places, name) for name in took_ns)
        return {link.name: least_ns * counts[place] for place, link in enumerate(self.chain.links)}

    def by_hand(
        self, points: Sequence[str], micro_batches: int | None, mesh: Mapping[str, int]
    ) -> tuple[Job, Job]:
        """The job whose stages begin at ``points``, and its ``slower`` variant.

        Raises PlanError if the model or its batch cannot be split this way.
        """
        stages = len(points) + 1
        workers = self.job.world_size
        mesh = mesh or (
            {PIPELINE: stages} if stages == workers else {PIPELINE: stages, DATA: workers // stages}
        )
        if math.prod(mesh.values()) != workers or mesh.get(PIPELINE) != stages:
            raise PlanError(
                "the plan's stages do not divide the recorded ranks", got=f"{stages} stages on {workers} ranks",
                expected="the same number of ranks for each stage",
            )  # fmt: skip
        count = micro_batches or self.micro_batches(stages)
        if (samples := stages * self.chain.samples) % count:
            raise PlanError(
                "the batch of a pipeline does not split evenly into the plan's micro-batches",
                got=f"{samples} samples and {count} micro-batches",
            )  # fmt: skip
        layers = self.split_layers(stages, count)
        cut = cut_by_hand(layers, stages, points)
        return self.cut(cut, count, mesh), self.slower(cut, count, mesh)

    def _workers(self, order: Sequence[int]) -> list[int]:
        """The recorded rank whose device each rank uses, with the hosts in ``order``."""
        firsts, first = [], 0
        for host in self.job.on.hosts:
            firsts.append(first)
            first += host.workers
        return [firsts[host] + worker for host in order for worker in range(self.job.on.hosts[host].workers)]


def _layers(chain: Chain, forward_ns: Sequence[int], backward_ns: Sequence[int]) -> tuple[LayerTimes, ...]:
    """The chain with times. It may be split only between modules that both have parameters."""
    links = chain.links
    first = next((place for place, link in enumerate(links) if link.parameters), len(links))
    return tuple(
        LayerTimes(
            link.name, link.parameters, forward_ns[place], backward_ns[place], kept_bytes=link.kept_bytes,
            cut_bytes=link.output_bytes
            if place >= first and place + 1 < len(links) and links[place + 1].parameters
            else 0,
        )
        for place, link in enumerate(links)
    )  # fmt: skip


def _step(chain: Chain, timeline: Timeline, forward: Sequence[float], backward: Sequence[float]) -> LayerStep:
    profile = profile_of({timeline.rank: (timeline,)})
    reads_ns = sum(item.duration_ns for item in timeline.items if item.kind == Part.READ)
    return LayerStep(
        _layers(
            chain,
            [round(share * profile.forward_ns) for share in forward],
            [round(share * profile.backward_ns) for share in backward],
        ),
        optimizer_ns=profile.optimizer_ns,
        loss_ns=profile.between_ns,
        rest_ns=profile.tail_ns + profile.rest_ns + reads_ns,
    )


def _shares(
    chain: Chain, events: Events, steps: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Each module's share of forward and of backward; None if the modules did not run in the order of the chain.

    Computation before the first module and after the last counts toward them.
    """
    forward, backward = [0] * len(chain.links), [0] * len(chain.links)
    places = {link.name: place for place, link in enumerate(chain.links)}
    rows = events.of_kind(Kind.FORWARD, Kind.BACKWARD, Kind.FORWARD_PASS)
    for step in steps:
        step_rows = sorted(rows.of_step(step), key=lambda row: row.start_ns)
        forward_pass = next(row for row in step_rows if row.kind == Kind.FORWARD_PASS)
        begins: dict[int, int] = {}
        at = len(chain.links) - 1
        for row in step_rows:
            place = _place(places, row.name)
            if row.kind == Kind.FORWARD and place is not None:
                begins.setdefault(place, row.start_ns)
            elif row.kind == Kind.BACKWARD:
                at = at if place is None else place
                backward[at] += row.duration_ns
        moments = [begins.get(place, -1) for place in range(1, len(chain.links))]
        if -1 in moments or moments != sorted(moments):
            return None
        bounds = [forward_pass.start_ns, *moments, forward_pass.end_ns]
        for place in range(len(chain.links)):
            forward[place] += max(0, bounds[place + 1] - bounds[place])
    if not sum(forward) or not sum(backward):
        return None
    return tuple(layer_ns / sum(forward) for layer_ns in forward), tuple(
        layer_ns / sum(backward) for layer_ns in backward
    )


def _place(places: Mapping[str, int], name: str) -> int | None:
    """The index of the chain's module that is, or contains, ``name``."""
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name)


CUT_SHARE = 0.25
"""The uncertainty, as a share of the step, of splitting a model that was recorded unsplit: times are assumed proportional
to the size of micro-batches. Not calibrated. The fixed cost of calls comes on top (``slower``)."""
SPLIT_SHARE = 0.1
"""The same for moving modules between recorded stages."""


def stage_links(trace: Trace, job: Job) -> StageLinks | str:
    """The modules of the recorded stages, or the reason why they are unknown."""
    replicas = job.world_size // len(job.stages) if job.mesh else 1
    why = why_not_split(trace.stages, stages_a_rank=trace.stages_a_rank, replicas=replicas)
    return why or StageLinks(trace.stages, job.boundary_bytes)


def names_stages(strategy: Strategy) -> bool:
    """Whether the strategy sets split points."""
    pipeline = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    return isinstance(pipeline, PipelineStrategy) and bool(pipeline.split_points)


def job_under(
    trace: Trace, job: Job, recorded: Strategy, strategy: Strategy, mesh: Mapping[str, int] | None = None
) -> tuple[Job, Job | None]:
    """``job`` with the stages that the ``split_points`` of ``strategy`` define; unchanged without split points.

    Also returns the slowest job that it may turn out to be, if times of micro-batches are unknown. ``mesh`` is the
    plan's. Raises PlanError if the recording cannot be split this way.
    """
    pipeline, before = (
        policy.pipeline if isinstance(policy, MeshStrategy) else policy for policy in (strategy, recorded)
    )
    if not isinstance(pipeline, PipelineStrategy) or not pipeline.split_points:
        return job, None
    if isinstance(before, PipelineStrategy) and before.split_points == pipeline.split_points:
        return job, None
    if len(job.stages) == 1:
        if why := why_not_cut(trace, job, recorded):
            raise PlanError(
                "the recorded model cannot be replayed in stages", got=why,
                expected="a model whose forward calls its modules in sequence",
            )  # fmt: skip
        return CutRecording(trace, job).by_hand(pipeline.split_points, pipeline.micro_batches, mesh or {})
    links = stage_links(trace, job)
    if isinstance(links, str):
        raise PlanError(
            "the recorded stages cannot be replayed with other split_points", got=links,
            fix="Leave out split_points to keep the recorded stages.",
        )  # fmt: skip
    if (ends := links.ends_at(pipeline.split_points)) is None:
        raise PlanError(
            "the recorded stages cannot be split at the plan's split_points", got=", ".join(pipeline.split_points),
            expected=f"{len(job.stages) - 1} of their modules, in order"
            + ("" if links.named else "; modules of different stages have the same names, so they cannot be told apart"),
        )  # fmt: skip
    return (job if ends == links.ends else links.resplit(job, ends)), None
