"""Cutting a module that is in one piece into stages: which children each stage has, and which weights they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from headway.errors import PlanError, UnsupportedError
from headway.planning.stage_split import SplitLayer, split


@dataclass(frozen=True)
class Cut:
    """``stages[s]`` are the names of the children of stage ``s``; ``tied`` are names of one parameter in several."""

    stages: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]

    def stage_of(self, name: str) -> int:
        """The stage of a parameter or a buffer."""
        child = name.partition(".")[0]
        return next(stage for stage, children in enumerate(self.stages) if child in children)


def cut(model: nn.Module, stages: int, split_points: Sequence[str] = ()) -> Cut:
    """Cut ``model`` into ``stages`` at ``split_points``, each the child at which a stage begins, or evenly.

    Raises UnsupportedError for a module that does not call its children one after the other (``nn.Sequential`` does),
    PlanError for points that are none of its children, not in their order, or of another number of stages.
    """
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            "only a torch.nn.Sequential is cut into stages",
            got=type(model).__name__,
            expected="modules that are called one after the other",
            fix="Make it a Sequential of its layers, or build stages with torch.distributed.pipelining and start the "
            "script with headway run.",
        )
    names = [name for name, _ in model.named_children()]
    begins = _at_points(names, stages, split_points) if split_points else _balanced(model, stages)
    ends = [*begins[1:], len(names)]
    parts = tuple(tuple(names[begin:end]) for begin, end in zip(begins, ends, strict=True))
    return Cut(parts, _tied(model))


def _at_points(names: Sequence[str], stages: int, points: Sequence[str]) -> list[int]:
    unknown = [point for point in points if point not in names]
    if unknown:
        raise PlanError(
            "the plan begins stages at modules that the model does not have", got=", ".join(unknown),
            expected=f"children of the model: {', '.join(names[:16])}{' …' if len(names) > 16 else ''}",
        )  # fmt: skip
    begins = [0, *(names.index(point) for point in points)]
    if len(begins) != stages or any(one >= other for one, other in pairwise(begins)):
        raise PlanError(
            "the plan's split_points do not cut the model into as many stages as there are ranks",
            got=", ".join(points), expected=f"{stages - 1} children but the first, in their order",
        )  # fmt: skip
    return begins


def _balanced(model: nn.Sequential, stages: int) -> list[int]:
    """Time is taken to be in proportion to parameters: nothing else is known of a module that was not recorded."""
    layers = []
    for name, child in model.named_children():
        size_bytes = sum(each.numel() * each.element_size() for each in child.parameters())
        layers.append(SplitLayer(name, size_bytes + 1.0, 2.0 * size_bytes + 1.0, size_bytes, cut_bytes=0))
    found = split(layers, stages, 8 * stages, lambda _stage, _bytes: 0.0)
    if not found:
        raise PlanError(
            "the model has fewer children than there are stages", got=f"{len(layers)}", expected=f"at least {stages}",
        )  # fmt: skip
    return [0, *found[0].ends[:-1]]


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(own) for own in names.values() if len(own) > 1)
