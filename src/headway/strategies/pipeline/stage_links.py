"""Finds other splits of a recorded pipeline's modules over its stages, and the jobs that these would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from headway.graph.computation import Part, Point, Timeline
from headway.job import Job
from headway.model import ChainLink, ModelSpec
from headway.strategies.pipeline.stage_times import Split, SplitLayer, split

SPLITS = 4
_PASSES = (Part.FORWARD, Part.BACKWARD)


def why_not_split(stages: Sequence[ModelSpec], *, stages_a_rank: int = 1, replicas: int = 1) -> str:
    """Why other splits of ``stages`` cannot be evaluated; "" if they can."""
    if stages_a_rank > 1:
        return "ranks have several stages"
    if replicas > 1:
        return "stages have replicas"
    for number, stage in enumerate(stages):
        if stage.chain is None:
            return "the recording has no sizes of the tensors between modules"
        if stage.chain.why_not:
            return f"stage {number}: {stage.chain.why_not}"
        if any(not link.forward_ns or not link.backward_ns for link in stage.chain.links):
            return f"modules of stage {number} were not timed before the recording (record with more warm-up steps)"
    return ""


@dataclass(frozen=True)
class StageLinks:
    """The modules of all stages in order; ``why_not_split`` must be "".

    ``boundary_bytes[s]`` is what stage ``s`` currently sends per micro-batch.
    """

    stages: tuple[ModelSpec, ...]
    boundary_bytes: tuple[int, ...]

    @cached_property
    def links(self) -> list[tuple[int, ChainLink]]:
        """Each module with the stage that has it."""
        return [
            (stage, link)
            for stage, model in enumerate(self.stages)
            if model.chain
            for link in model.chain.links
        ]

    @property
    def ends(self) -> tuple[int, ...]:
        """For each stage, the number of modules up to its end in the current split."""
        counts = [len(model.chain.links) if model.chain else 0 for model in self.stages]
        return tuple(sum(counts[: stage + 1]) for stage in range(len(counts)))

    @property
    def named(self) -> bool:
        """Whether all modules have distinct names, as in one model."""
        names = [link.name for _, link in self.links]
        return len(set(names)) == len(names)

    def points(self, ends: Sequence[int]) -> tuple[str, ...]:
        """The names of the modules at which the stages of a split begin, except the first stage."""
        return tuple(self.links[end][1].name for end in ends[:-1])

    def ends_at(self, points: Sequence[str]) -> tuple[int, ...] | None:
        """The split whose stages begin at these modules; None if that is not possible."""
        names = [link.name for _, link in self.links]
        if not self.named or any(point not in names for point in points):
            return None
        ends = (*(names.index(point) for point in points), len(names))
        layers = self._layers()
        fits = len(ends) == len(self.stages) and list(ends) == sorted(set(ends))
        return (
            ends
            if fits and ends[0] and all(layers[end - 1].cut_bytes is not None for end in ends[:-1])
            else None
        )

    def _layers(self) -> list[SplitLayer]:
        links, ends = self.links, self.ends
        first = next((place for place, (_, link) in enumerate(links) if link.parameters), len(links))
        layers = []
        for place, (stage, link) in enumerate(links):
            size = self.boundary_bytes[stage] if place + 1 in ends[:-1] else link.output_bytes
            permitted = size and place >= first and place + 1 < len(links) and links[place + 1][1].parameters
            layers.append(
                SplitLayer(
                    link.name, link.forward_ns, link.backward_ns,
                    sum(self.stages[stage].by_name[name].size_bytes for name in self._canonical_names(stage, link)),
                    link.kept_bytes, size if permitted or place + 1 in ends[:-1] else None,
                )
            )  # fmt: skip
        return layers

    def splits(self, micro_batches: int, passing_ns: Callable[[int, int], float]) -> tuple[Split, ...]:
        """The most promising splits on equal devices. ``passing_ns``: see ``split``."""
        return split(self._layers(), len(self.stages), micro_batches, passing_ns, keep=SPLITS)

    def boundaries_of(self, ends: Sequence[int]) -> tuple[int, ...]:
        """The bytes that each stage of a split sends per micro-batch."""
        layers = self._layers()
        return tuple(layers[end - 1].cut_bytes or 0 for end in ends[:-1])

    def pass_of(self, ends: Sequence[int], stage: int, part: str, took: Callable[[int], float]) -> float:
        """The time of a pass of a stage of a split, if that of stage ``s`` currently takes ``took(s)``."""
        total = 0.0
        for place in range(ends[stage - 1] if stage else 0, ends[stage]):
            old, link = self.links[place]
            total += took(old) * _share(self.stages[old], link, part)
        return total

    def moves(self, ends: Sequence[int]) -> str:
        """Describe which modules move: "3 … 4 from stage 1 to stage 0"."""
        new = [
            stage for stage, end in enumerate(ends) for _ in range(end - (ends[stage - 1] if stage else 0))
        ]
        moved = []
        for (old, to), group in _grouped(self.links, new):
            if old != to:
                names = f"{group[0]} … {group[-1]}" if len(group) > 1 else group[0]
                moved.append(f"{names} from stage {old} to stage {to}")
        return " and ".join(moved)

    def _canonical_names(self, stage: int, link: ChainLink) -> list[str]:
        chain = self.stages[stage].chain
        assert chain is not None
        return [chain.aliases.get(name, name) for name in link.parameters]

    # As a job ----------------------------------------------------------------------------------------

    def resplit(self, job: Job, ends: Sequence[int]) -> Job:
        """The recorded ``job`` under another split, on the same ranks and in the same order of passes."""
        stage_of = {
            rank: next(item.stage for item in steps[0].items if item.micro_batch >= 0)
            for rank, steps in job.steps.timelines.items()
        }
        rank_of = {stage: rank for rank, stage in stage_of.items()}
        boundaries = self.boundaries_of(ends)
        models = self.models(ends)
        timelines = {}
        for rank, steps in job.steps.timelines.items():
            stage = stage_of[rank]
            updated = models[stage].size_bytes / max(1, self.stages[stage].size_bytes)
            timelines[rank] = tuple(
                self._rewritten(
                    timeline, stage, ends, boundaries, updated,
                    {old: job.steps.timelines[rank_of[old]][at] for old in rank_of}, stage_of,
                )
                for at, timeline in enumerate(steps)
            )  # fmt: skip
        computation = replace(job.steps, timelines=timelines, with_factors=None)
        return replace(job, stages=models, boundary_bytes=boundaries, computation=computation)

    def _rewritten(
        self,
        timeline: Timeline,
        stage: int,
        ends: Sequence[int],
        boundaries: Sequence[int],
        updated: float,
        timelines: dict[int, Timeline],
        stage_of: dict[int, int],
    ) -> Timeline:
        took = {number: _passes_ns(recorded) for number, recorded in timelines.items()}
        factors = {
            (part, micro_batch): self.pass_of(
                ends,
                stage,
                part,
                lambda old, key=(part, micro_batch): took[old].get(key, 0),  # type: ignore[misc]
            )
            / own_ns
            for (part, micro_batch), own_ns in took[stage].items()
            if own_ns
        }
        items = []
        for item in timeline.items:
            if item.kind in _PASSES:
                factor = factors.get((item.kind, item.micro_batch), 1.0)
                item = item._replace(duration_ns=round(item.duration_ns * factor))
            elif item.kind == Part.OPTIMIZER:
                item = item._replace(duration_ns=round(item.duration_ns * updated))
            elif item.kind in (Point.MESSAGE, Point.ARRIVED) and item.message is not None:
                boundary = min(stage, stage_of[item.message.peer])
                size_bytes = round(
                    item.size_bytes * boundaries[boundary] / max(1, self.boundary_bytes[boundary])
                )
                item = item._replace(size_bytes=size_bytes)
            items.append(item)
        return replace(timeline, items=tuple(items))

    def models(self, ends: Sequence[int]) -> tuple[ModelSpec, ...]:
        """The model of each stage of a split, with a rough estimate of its memory."""
        models = []
        states = sum(stage.optimizer_state_bytes for stage in self.stages)
        sizes = sum(stage.size_bytes for stage in self.stages)
        for stage, end in enumerate(ends):
            stage_links = self.links[ends[stage - 1] if stage else 0 : end]
            parameters = {
                name: self.stages[old].by_name[canonical].model_copy(update={"name": name})
                for old, link in stage_links
                for name, canonical in zip(link.parameters, self._canonical_names(old, link), strict=True)
            }
            size = sum(parameter.size_bytes for parameter in parameters.values())
            models.append(
                ModelSpec(
                    parameters=tuple(parameters.values()),
                    activation_bytes=sum(link.kept_bytes for _, link in stage_links),
                    optimizer_state_bytes=round(states * size / max(1, sizes)),
                )
            )
        return tuple(models)


def _grouped(
    links: Sequence[tuple[int, ChainLink]], new: Sequence[int]
) -> list[tuple[tuple[int, int], list[str]]]:
    """The names of consecutive modules that move from the same stage to the same stage."""
    keyed = [((old, to), link.name) for (old, link), to in zip(links, new, strict=True)]
    return [(key, [name for _, name in group]) for key, group in groupby(keyed, key=lambda pair: pair[0])]


def _share(stage: ModelSpec, link: ChainLink, part: str) -> float:
    """The fraction of its stage's pass time that a module takes."""
    assert stage.chain is not None
    name = "forward_ns" if part == Part.FORWARD else "backward_ns"
    own_ns: int = getattr(link, name)
    all_ns: int = sum(getattr(member, name) for member in stage.chain.links)
    return own_ns / all_ns


def _passes_ns(timeline: Timeline) -> dict[tuple[str, int], int]:
    passes_ns: dict[tuple[str, int], int] = {}
    for item in timeline.items:
        if item.kind in _PASSES and item.micro_batch >= 0:
            key = item.kind, item.micro_batch
            passes_ns[key] = passes_ns.get(key, 0) + item.duration_ns
    return passes_ns
