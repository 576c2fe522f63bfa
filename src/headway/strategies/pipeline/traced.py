"""An ordinary module cut into stages: its forward, recorded in both modes, of which each makes its share of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.errors import PlanError, UnsupportedError, UserError
from headway.strategies.pipeline import dividing
from headway.strategies.pipeline.calls import Ambience, Like, Program, Recording
from headway.strategies.pipeline.examples import form_of, micro_batch_of, said_of, split_up
from headway.strategies.pipeline.traced_stage import (
    dots_in,
    names_of,
    state_of,
    submodules_of,
    tied_in,
    traced_stage,
)
from headway.strategies.pipeline.tracing import SplitInsideError, record
from headway.torch_private.tracing import leaves, mapped

_MOST_ATTEMPTS = 64


@dataclass(frozen=True)
class TracedCut:
    """A model cut into stages; ``stages_of[name]`` has those of each parameter and buffer.

    ``tied`` are names of one parameter. ``not_evaluated`` says why there is no evaluation; "" where there is one.
    """

    programs: tuple[Mapping[bool, Program], ...]
    boundaries: tuple[tuple[Like, ...], ...]
    names: tuple[frozenset[str], ...]
    tied: tuple[tuple[str, ...], ...]
    trained: frozenset[str]
    outputs: Mapping[bool, Any]
    last: tuple[Like, ...]
    example: tuple[Any, tuple[Like, ...]]
    ambience: Ambience
    device: torch.device
    not_evaluated: str = ""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that have a parameter or a buffer."""
        return tuple(stage for stage, own in enumerate(self.names) if name in own)

    def said(self) -> str:
        """What all ranks have to agree on."""
        return repr(([sorted(own) for own in self.names], self.boundaries, self.ambience))

    def check(self, stage: nn.Module) -> None:
        """Raise UserError where a step would compute in other types, or gradients of others, than was recorded."""
        now = Ambience.now(self.device)
        if now.autocast != self.ambience.autocast:
            raise UserError(
                "stages hand on other types under autocast than without, and were cut for the other",
                got=f"autocast to {now.autocast or 'nothing'}", expected=f"to {self.ambience.autocast or 'nothing'}",
                fix="Call parallelize, train_step and evaluate under the same torch.autocast.",
            )  # fmt: skip
        changed = [
            name for name, each in stage.named_parameters() if each.requires_grad != (name in self.trained)
        ]
        if changed:
            raise UserError(
                "requires_grad of parameters was changed after the model had been cut into stages",
                got=", ".join(changed[:4]), fix="Freeze parameters before parallelize.",
            )  # fmt: skip

    def module(self, model: nn.Module, stage: int) -> nn.Module:
        """The stage, of the submodules, parameters and buffers of ``model``."""
        return traced_stage(model, self.programs[stage], self.names[stage], self.device)

    def arguments(self, stage: int) -> dict[str, tuple[torch.Tensor, ...]]:
        """What ``PipelineStage`` is told about what the stage is given and hands on."""
        given = self.boundaries[stage - 1] if stage else self.example[1]
        out = self.boundaries[stage] if stage < len(self.boundaries) else self.last
        return {
            "input_args": tuple(each.tensor() for each in given),
            "output_args": tuple(each.tensor() for each in out),
        }

    def inputs(self, batch: Any, micro_batches: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a batch. Raises UserError for one that is not like the example."""
        form, likes = self.example
        found = split_up(batch)
        tensors = [each for each in leaves(found) if isinstance(each, torch.Tensor)]
        shapes = [(micro_batches * like.shape[0], *like.shape[1:]) for like in likes]
        if form_of(found) != form or [tuple(each.shape) for each in tensors] != shapes or any(
            each.dtype != like.dtype for each, like in zip(tensors, likes, strict=True)
        ):  # fmt: skip
            raise UserError(
                "a batch is not like example_batch, of which the model was cut into stages",
                got=said_of(tensors), expected=", ".join(str(list(each)) for each in shapes),
                fix="Give batches of one shape (drop_last=True in a DataLoader), and an example of that.",
            )  # fmt: skip
        return tuple(tensors)

    def output(self, given: Any, *, training: bool) -> Any:
        """What the model would return, of the tensors of its last stage."""
        values = self.programs[-1][training].outputs
        held = dict(zip(values, given if isinstance(given, tuple) else (given,), strict=True))
        return mapped(
            lambda each: held.get(each, each) if _is_hashable(each) else each, self.outputs[training]
        )


def traced_cut(
    model: nn.Module,
    stages: int,
    points: Sequence[str],
    example: Any,
    micro_batches: int,
    device: torch.device,
) -> TracedCut:
    """Cut ``model`` into ``stages`` that begin at the modules ``points``, or at calls of ``pipe_split``, or evenly.

    ``example`` is a batch as ``train_step`` is given them. Raises UnsupportedError for a module that cannot be traced
    or divided, PlanError for points where it cannot be cut, UserError for an example that does not split evenly.
    """
    _check_plain(model)
    example = split_up(example)
    args, kwargs = micro_batch_of(example, micro_batches)
    tracer = _Tracer(model, args, kwargs, device)
    dividing.check_names(model, points)
    with _mode(model, training=True):
        inside, begins_at = tracer.where(points, stages)
        recording = tracer.record(inside)
        begins = begins_at(recording)
        training = dividing.divide(recording, begins)
    programs, outputs = [training.programs], {True: recording.output}
    not_evaluated = ""
    try:
        with _mode(model, training=False):
            evaluated = tracer.record(inside)
            evaluation = dividing.divide(evaluated, begins_at(evaluated))
        if _plain(evaluation.boundaries) != _plain(training.boundaries):
            not_evaluated = "its stages hand on other tensors in evaluation than in training"
        programs.append(evaluation.programs)
        outputs[False] = evaluated.output
    except (UnsupportedError, PlanError) as failure:
        not_evaluated = str(failure)
    by_stage = [dict(zip((True, False), own, strict=False)) for own in zip(*programs, strict=True)]
    names = names_of(model, by_stage)
    _check_buffers(model, by_stage)
    trained = frozenset(
        name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad
    )
    likes = tuple(recording.likes[each] for each in recording.inputs)
    last = tuple(recording.likes[each] for each in recording.outputs())
    return TracedCut(
        tuple(by_stage), training.boundaries, names, tied_in(model), trained, outputs, last, (form_of(example), likes),
        Ambience.now(device), device, not_evaluated,
    )  # fmt: skip


class _Tracer:
    def __init__(self, model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> None:
        self._model, self._args, self._kwargs, self._device = model, args, kwargs, device

    def record(self, inside: set[str], *, split_inside: bool = False) -> Recording:
        return record(self._model, self._args, self._kwargs, inside, self._device, split_inside=split_inside)

    def where(self, points: Sequence[str], stages: int) -> tuple[set[str], Any]:
        """Which modules to look into, and what says of a recording where stages begin in it."""
        model = self._model
        if not points:
            inside = {""}
            for _ in range(_MOST_ATTEMPTS):
                try:
                    recording = self.record(inside, split_inside=True)
                except SplitInsideError as found:
                    inside |= found.names
                    continue
                if recording.marks:
                    return inside, lambda each: dividing.at_marks(model, each, stages)
                break
            points = self._balanced(stages)
        inside = {point[:at] for point in points for at in dots_in(point)} | {""}
        return inside, lambda each: dividing.at_points(model, each, points, stages)

    def _balanced(self, stages: int) -> list[str]:
        """Look into what has more than a stage's share of the parameters, as far as that can be traced."""
        inside = {"", *(name for name, each in self._model.named_modules() if _is_sequential(each))}
        recording, passed_over = self.record(inside), set[str]()
        for _ in range(_MOST_ATTEMPTS):
            name, share = dividing.largest(self._model, recording, passed_over)
            if share <= 1 / stages:
                break
            try:
                recording = self.record(inside | {name})
                inside.add(name)
            except UnsupportedError:
                passed_over.add(name)
        return dividing.balanced(self._model, recording, stages)


# What is refused ------------------------------------------------------------------------------------------


def _check_plain(model: nn.Module) -> None:
    for name, each in state_of(model):
        if "DTensor" in type(each).__name__ or "DTensor" in type(each.data).__name__:
            raise UnsupportedError(
                "a model of DTensors is not cut into stages", got=name, expected="plain tensors",
                fix="Cut the model before it is sharded.",
            )  # fmt: skip


def _check_buffers(model: nn.Module, programs: Sequence[Mapping[bool, Program]]) -> None:
    """Statistics that each stage would have its own of."""
    seen: dict[str, int] = {}
    for stage, own in enumerate(programs):
        for name in {each.name for program in own.values() for each in submodules_of(program)}:
            if seen.setdefault(name, stage) == stage:
                continue
            if any(
                getattr(each, "track_running_stats", False) for each in model.get_submodule(name).modules()
            ):
                raise UnsupportedError(
                    "a module that several stages call keeps statistics, and each would have its own",
                    got=name, fix="Choose split_points so that one stage calls it.",
                )  # fmt: skip


# Small things ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Have the model in a mode. In training, modules that are in the other one (frozen statistics) stay so."""
    before = [(each, each.training) for each in model.modules()]
    if not training or not model.training:
        model.train(training)
    try:
        yield
    finally:
        for each, was in before:
            each.training = was


def _plain(boundaries: Sequence[Sequence[Like]]) -> list[list[tuple[tuple[int, ...], torch.dtype]]]:
    return [[(each.shape, each.dtype) for each in own] for own in boundaries]


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_hashable(value: Any) -> bool:
    return type(value).__hash__ is not None
