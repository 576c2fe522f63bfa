"""A data-parallel recording as the job of pipelines: its model cut along the chain of modules that was seen.

Forward and backward of each module of the chain are the shares that its spans have of each recorded step.
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
UNEQUAL = 1.1  # times as long as another rank's step, from which on devices are taken to differ
NOT_SEEN = "the recording does not say how much modules hand on to each other"


def why_not_cut(trace: Trace, job: Job, recorded: Strategy) -> str:
    """Why no pipelines can be made of the recorded model; "" where they can."""
    chain = trace.model.chain
    if chain is None or trace.missing_ranks or not job.has_parameters:
        return NOT_SEEN
    if chain.why_not or len(chain.links) < 2:
        return chain.why_not or NOT_SEEN
    if trace.model.find_unused_parameters:
        return "some parameters have no gradient in some steps (find_unused_parameters)"
    if plugin_of(recorded).carries_over:
        return (
            f"times of modules are not those of computation alone under {recorded.name}: record it with ddp"
        )
    for events in trace.events.values():
        passes = Counter(
            (row.step, row.kind) for row in events.of_kind(Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
        )
        if any(
            passes[step, kind] != 1
            for step in trace.steps
            for kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS)
        ):
            return "a step has not one forward and one backward"
        if any(_shares(chain, events, trace.steps) is None for events in trace.events.values()):
            return "the recorded spans of modules are not in the order of the chain"
    if not any(layer.cut_bytes for layer in _layers(chain, [0] * len(chain.links), [0] * len(chain.links))):
        return "there is no module behind which it can be cut"
    return ""


@dataclass(frozen=True)
class CutRecording:
    """The recorded job of ``trace`` as one that can be cut, which ``why_not_cut`` has nothing against."""

    trace: Trace
    job: Job

    @property
    def chain(self) -> Chain:
        """The modules that it is cut along."""
        assert self.trace.model.chain is not None
        return self.trace.model.chain

    @cached_property
    def model(self) -> CutModel:
        """The model, with every recorded step of every rank."""
        return CutModel(self.trace.model, self._steps.__getitem__, self.chain.aliases)

    @cached_property
    def _steps(self) -> Mapping[int, tuple[LayerStep, ...]]:
        found = {}
        for rank, timelines in self.job.steps.timelines.items():
            shares = _shares(self.chain, self.trace.events[rank], self.trace.steps)
            assert shares is not None
            found[rank] = tuple(_step(self.chain, timeline, *shares) for timeline in timelines)
        return found

    def mean_layers(self) -> tuple[LayerTimes, ...]:
        """The layers with the mean of their times over ranks and steps."""
        steps = [each.layers for step in self._steps.values() for each in step]
        forward, backward = (
            [
                sum(getattr(layers[place], name) for layers in steps) / len(steps)
                for place in range(len(steps[0]))
            ]
            for name in ("forward_ns", "backward_ns")
        )
        return _layers(self.chain, [round(each) for each in forward], [round(each) for each in backward])

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """How fast each rank computes, 1 for the mean; all alike where none takes ``UNEQUAL`` times as long."""
        took_ns = [
            sum(layer.forward_ns + layer.backward_ns for step in own for layer in step.layers) / len(own)
            for _, own in sorted(self._steps.items())
        ]
        mean_ns = sum(took_ns) / len(took_ns)
        if max(took_ns) < UNEQUAL * min(took_ns):
            return (1.0,) * len(took_ns)
        return tuple(mean_ns / each for each in took_ns)

    def micro_batches(self, stages: int) -> int:
        """Four a stage, or fewer where a batch of as many workers does not split evenly into these."""
        samples = stages * self.chain.samples
        return max(each for each in range(1, MICRO_BATCHES_A_STAGE * stages + 1) if samples % each == 0)

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
        """The splits that promise most, where hosts stand in ``order``."""
        cluster = reordered(self.job.on, order)
        ranks = groups_along(mesh, PIPELINE)[0]
        workers = self._workers(order)
        speeds = [self.speeds[workers[rank]] for rank in ranks]
        return split(layers, mesh[PIPELINE], micro_batches, passing(cluster, ranks), speeds=speeds, keep=keep)

    def cut(self, cut: Split, micro_batches: int, mesh: Mapping[str, int], order: Sequence[int] = ()) -> Job:
        """The job of these stages, where hosts stand in ``order``."""
        return self._cut(self.model, cut, micro_batches, mesh, order)

    def slower(
        self, cut: Split, micro_batches: int, mesh: Mapping[str, int], order: Sequence[int] = ()
    ) -> Job:
        """The same if every module took the time of the quickest recorded one for however few samples.

        That is the most that calls themselves can cost, for all that the recording says.
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
        """For each module of the chain, what its inner modules would take at the speed of the quickest of all."""
        places = {link.name: place for place, link in enumerate(self.chain.links)}
        took_ns: dict[str, list[int]] = defaultdict(list)
        for row in self.trace.events[min(self.trace.events)].of_kind(Kind.FORWARD):
            took_ns[row.name].append(row.duration_ns)
        least_ns = min(median(each) for each in took_ns.values())
        counts = Counter(_place(places, name) for name in took_ns)
        return {link.name: least_ns * counts[place] for place, link in enumerate(self.chain.links)}

    def by_hand(
        self, points: Sequence[str], micro_batches: int | None, mesh: Mapping[str, int]
    ) -> tuple[Job, Job]:
        """The job of stages that begin at ``points``, and the ``slower`` one.

        Raises PlanError where they cannot, or batches do not split.
        """
        stages = len(points) + 1
        workers = self.job.world_size
        mesh = mesh or (
            {PIPELINE: stages} if stages == workers else {PIPELINE: stages, DATA: workers // stages}
        )
        if math.prod(mesh.values()) != workers or mesh.get(PIPELINE) != stages:
            raise PlanError(
                "the plan's stages do not share the recorded ranks", got=f"{stages} stages on {workers} ranks",
                expected="as many ranks for each stage",
            )  # fmt: skip
        count = micro_batches or self.micro_batches(stages)
        if (samples := stages * self.chain.samples) % count:
            raise PlanError(
                "a batch of as many workers as there are stages does not split evenly into the plan's micro-batches",
                got=f"{samples} samples and {count} micro-batches",
            )  # fmt: skip
        layers = self.split_layers(stages, count)
        cut = cut_by_hand(layers, stages, points)
        return self.cut(cut, count, mesh), self.slower(cut, count, mesh)

    def _workers(self, order: Sequence[int]) -> list[int]:
        """Which recorded rank's device each rank has, where hosts stand in ``order``."""
        firsts, first = [], 0
        for host in self.job.on.hosts:
            firsts.append(first)
            first += host.workers
        return [firsts[host] + worker for host in order for worker in range(self.job.on.hosts[host].workers)]


def _layers(chain: Chain, forward_ns: Sequence[int], backward_ns: Sequence[int]) -> tuple[LayerTimes, ...]:
    """The chain with times. It is cut only before modules with parameters, behind others with some."""
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
    """The share of each module of the chain in forward and in backward; None where it was not seen in this order.

    What is computed before the first and behind the last counts to these.
    """
    forward, backward = [0] * len(chain.links), [0] * len(chain.links)
    places = {link.name: place for place, link in enumerate(chain.links)}
    rows = events.of_kind(Kind.FORWARD, Kind.BACKWARD, Kind.FORWARD_PASS)
    for step in steps:
        own = sorted(rows.of_step(step), key=lambda row: row.start_ns)
        whole = next(row for row in own if row.kind == Kind.FORWARD_PASS)
        begins: dict[int, int] = {}
        at = len(chain.links) - 1
        for row in own:
            place = _place(places, row.name)
            if row.kind == Kind.FORWARD and place is not None:
                begins.setdefault(place, row.start_ns)
            elif row.kind == Kind.BACKWARD:
                at = at if place is None else place
                backward[at] += row.duration_ns
        moments = [begins.get(place, -1) for place in range(1, len(chain.links))]
        if -1 in moments or moments != sorted(moments):
            return None
        bounds = [whole.start_ns, *moments, whole.end_ns]
        for place in range(len(chain.links)):
            forward[place] += max(0, bounds[place + 1] - bounds[place])
    if not sum(forward) or not sum(backward):
        return None
    return tuple(each / sum(forward) for each in forward), tuple(each / sum(backward) for each in backward)


def _place(places: Mapping[str, int], name: str) -> int | None:
    """Which module of the chain ``name`` is, or is inside of."""
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name)


CUT_SHARE = 0.25
"""By what share of its step a job whose model was recorded in one piece may be off: times of micro-batches are taken to
be in proportion to their size. It is not calibrated. What calls themselves cost comes on top (``slower``)."""
SPLIT_SHARE = 0.1
"""The same where modules of recorded stages are split otherwise."""


def stage_links(trace: Trace, job: Job) -> StageLinks | str:
    """The modules of recorded stages, or why nothing is known of them."""
    replicas = job.world_size // len(job.stages) if job.mesh else 1
    why = why_not_split(trace.stages, stages_a_rank=trace.stages_a_rank, replicas=replicas)
    return why or StageLinks(trace.stages, job.boundary_bytes)


def names_stages(strategy: Strategy) -> bool:
    """Whether it says at which modules stages begin."""
    pipeline = strategy.pipeline if isinstance(strategy, MeshStrategy) else strategy
    return isinstance(pipeline, PipelineStrategy) and bool(pipeline.split_points)


def job_under(
    trace: Trace, job: Job, recorded: Strategy, asked: Strategy, mesh: Mapping[str, int] | None = None
) -> tuple[Job, Job | None]:
    """``job`` with the stages that ``asked`` names by ``split_points``; as it is where it names none.

    With it comes the job that it may be at worst, where times of micro-batches are not known. ``mesh`` is that of the
    plan. Raises PlanError where the recording does not say what that would be.
    """
    pipeline, before = (
        each.pipeline if isinstance(each, MeshStrategy) else each for each in (asked, recorded)
    )
    if not isinstance(pipeline, PipelineStrategy) or not pipeline.split_points:
        return job, None
    if isinstance(before, PipelineStrategy) and before.split_points == pipeline.split_points:
        return job, None
    if len(job.stages) == 1:
        if why := why_not_cut(trace, job, recorded):
            raise PlanError(
                "the recorded model cannot be replayed in stages", got=why,
                expected="a recording of modules that forward calls one after the other",
            )  # fmt: skip
        return CutRecording(trace, job).by_hand(pipeline.split_points, pipeline.micro_batches, mesh or {})
    links = stage_links(trace, job)
    if isinstance(links, str):
        raise PlanError(
            "the recorded stages cannot be replayed with other split_points", got=links,
            fix="Leave split_points out: stages are then as recorded.",
        )  # fmt: skip
    if (ends := links.ends_at(pipeline.split_points)) is None:
        raise PlanError(
            "the recorded stages cannot be split at the plan's split_points", got=", ".join(pipeline.split_points),
            expected=f"{len(job.stages) - 1} of their modules, in order"
            + ("" if links.named else "; modules of different stages have the same names, so that none can be told"),
        )  # fmt: skip
    return (job if ends == links.ends else links.resplit(job, ends)), None
