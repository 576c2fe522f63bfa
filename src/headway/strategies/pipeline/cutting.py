"""Cutting a module that is in one piece into stages: which children each stage has, and which weights they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

from headway.errors import PlanError, UnsupportedError
from headway.strategies.pipeline.stage_times import SplitLayer, split


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        return received.detach()  # no view, for autograd: those of a function cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def changeable(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The same tensors in the same memory, as results of an operation where they are leaves with gradients.

    Autograd refuses to have leaves changed in place, and a stage's inputs are leaves. Nothing else reads what a stage
    has received: the stage before it has the original, and if the stage itself has saved it for its backward, autograd
    says so as it does in one process.
    """
    return tuple(
        _Same.apply(value)  # type: ignore[no-untyped-call]
        if isinstance(value, torch.Tensor)
        and value.requires_grad
        and value.is_leaf
        and torch.is_grad_enabled()
        else value
        for value in inputs
    )


@dataclass(frozen=True)
class Cut:
    """``stages[s]`` are the names of the children of stage ``s``; ``tied`` are names of one parameter in several."""

    stages: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]

    not_evaluated: ClassVar[str] = ""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stage of a parameter or a buffer."""
        child = name.partition(".")[0]
        return tuple(stage for stage, children in enumerate(self.stages) if child in children)

    def signature(self) -> str:
        """What all ranks have to agree on."""
        return repr(self.stages)

    def module(self, model: nn.Module, stage: int) -> nn.Module:
        """The children of a stage, under their own names."""
        stage_module = nn.Sequential()
        for name in self.stages[stage]:
            stage_module.add_module(name, model.get_submodule(name))
        stage_module.training = model.training
        stage_module.register_forward_pre_hook(_make_changeable)
        return stage_module

    def arguments(self, stage: int) -> dict[str, Any]:
        """What ``PipelineStage`` is told: torch finds out itself what stages hand on."""
        del stage
        return {}

    def inputs(self, batch: Any, micro_batches: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch."""
        del micro_batches
        return (batch,)

    def output(self, result: Any, *, training: bool) -> Any:
        """What the model would return."""
        del training
        return result


def _make_changeable(_stage: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return changeable(inputs)


def cut(model: nn.Module, stages: int, split_points: Sequence[str] = ()) -> Cut:
    """Cut ``model`` into ``stages`` at ``split_points``, each the child at which a stage begins, or evenly.

    Raises UnsupportedError for a module other than ``nn.Sequential``, which calls its children one after the other,
    PlanError for points that are none of its children, not in their order, or of another number of stages.
    """
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(
            "only a torch.nn.Sequential is cut into stages without an example of a batch",
            got=type(model).__name__,
            fix="Give parallelize example_batch, a batch as train_step will be given them.",
        )
    names = [name for name, _ in _children(model)]
    begins = _at_points(names, stages, split_points) if split_points else _balanced(model, stages)
    ends = [*begins[1:], len(names)]
    parts = tuple(tuple(names[begin:end]) for begin, end in zip(begins, ends, strict=True))
    model_cut = Cut(parts, _tied(model))
    _check_buffers(model, model_cut)
    return model_cut


def _children(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """All of them in order: ``named_children`` leaves out a module that comes again."""
    modules = model.named_modules(remove_duplicate=False)
    return [(name, module) for name, module in modules if name and "." not in name]


def _check_buffers(model: nn.Module, model_cut: Cut) -> None:
    """Raise UnsupportedError where stages on several ranks would each change a buffer of their own."""
    stages: dict[int, set[int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        stages.setdefault(id(buffer), set()).update(model_cut.stages_of(name))
        if len(stages[id(buffer)]) > 1:
            raise UnsupportedError(
                "several stages share a buffer", got=name, expected="buffers that one stage has",
                fix="Construct a module for each place in the Sequential, or cut behind the last.",
            )  # fmt: skip


def _at_points(names: Sequence[str], stages: int, points: Sequence[str]) -> list[int]:
    unknown = [point for point in points if point not in names]
    if unknown:
        raise PlanError(
            "the plan begins stages at modules that the model does not have", got=", ".join(unknown),
            expected=f"children of the model: {', '.join(names[:16])}{' …' if len(names) > 16 else ''}",
            fix="Modules inside of them need example_batch." * any("." in point for point in unknown),
        )  # fmt: skip
    begins = [0, *(names.index(point) for point in points)]
    if len(begins) != stages or any(earlier >= later for earlier, later in pairwise(begins)):
        raise PlanError(
            "the plan's split_points do not cut the model into as many stages as there are ranks",
            got=", ".join(points), expected=f"{stages - 1} children but the first, in their order",
        )  # fmt: skip
    return begins


def _balanced(model: nn.Sequential, stages: int) -> list[int]:
    """Time is taken to be in proportion to parameters: nothing else is known of a module that was not recorded."""
    layers = []
    for name, child in _children(model):
        size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in child.parameters())
        layers.append(SplitLayer(name, size_bytes + 1.0, 2.0 * size_bytes + 1.0, size_bytes, cut_bytes=0))
    splits = split(layers, stages, 8 * stages, lambda _stage, _bytes: 0.0)
    if not splits:
        raise PlanError(
            "the model has fewer children than there are stages", got=f"{len(layers)}", expected=f"at least {stages}",
        )  # fmt: skip
    return [0, *splits[0].ends[:-1]]


def _tied(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(aliases) for aliases in names.values() if len(aliases) > 1)
