"""One stage of a traced model: what its calls need of the model, under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headway.errors import UserError
from headway.strategies.pipeline.calls import Attribute, Program, Submodule
from headway.strategies.pipeline.changeable import changeable


class TracedStage(nn.Module):
    """One stage: the submodules, parameters and buffers of a model that its calls need, under their own names.

    It makes the calls of the forward in training or in evaluation, as its mode is.
    """

    def __init__(self, programs: Mapping[bool, Program], device: torch.device) -> None:
        super().__init__()
        self.__dict__.update(_headway_programs=programs, _headway_device=device)

    def forward(self, *given: torch.Tensor) -> Any:
        """Make this stage's calls of what it is given; returns a tensor or a tuple of several."""
        program: Program | None = self.__dict__["_headway_programs"].get(self.training)
        if program is None:
            raise UserError(
                "this pipeline has no evaluation, and its stage is in that mode", fix="Call train()."
            )
        return program.run(self, changeable(given), self.__dict__["_headway_device"])


def traced_stage(
    model: nn.Module, programs: Mapping[bool, Program], names: frozenset[str], device: torch.device
) -> TracedStage:
    """The stage, of the submodules, parameters and buffers of ``model``."""
    found = TracedStage(programs, device)
    modules = {each.name for program in programs.values() for each in submodules_of(program)}
    called = {id(model.get_submodule(name)) for name in modules}
    for name, module in model.named_modules(remove_duplicate=False):  # outer ones first
        if id(module) in called:
            _owner(found, name).add_module(name.rpartition(".")[2], module)
    have = {name for name, _ in state_of(found)}
    stateful = model.state_dict(keep_vars=True).keys()
    for name, tensor in state_of(model):
        if name in names - have:
            owner, own = _owner(found, name), name.rpartition(".")[2]
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(own, tensor)
            else:
                owner.register_buffer(own, tensor, persistent=name in stateful)
    found.training = model.training
    return found


def submodules_of(program: Program) -> Iterator[Submodule]:
    """The submodules that a stage calls."""
    return (each for call in program.calls for each in call.uses(Submodule))


def names_of(model: nn.Module, programs: Sequence[Mapping[bool, Program]]) -> tuple[frozenset[str], ...]:
    """The parameters and buffers of each stage. What none uses is where it has another name, or on the first."""
    state = [*state_of(model)]
    modules = {name: id(each) for name, each in model.named_modules(remove_duplicate=False)}
    found: list[set[str]] = []
    for own in programs:
        called = {modules[each.name] for program in own.values() for each in submodules_of(program)}
        direct = {
            each.name for program in own.values() for call in program.calls for each in call.uses(Attribute)
        }
        found.append(
            {
                name
                for name, _ in state
                if name in direct or any(modules[each] in called for each in _owners(name))
            }
        )
    for name, tensor in state:
        if not any(name in own for own in found):
            same = {other for other, each in state if each is tensor}
            next((own for own in found if own & same), found[0]).add(name)
    return tuple(frozenset(own) for own in found)


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def dots_in(name: str) -> Iterator[int]:
    """Where the names of the modules around one end."""
    return (at for at, each in enumerate(name) if each == ".")


def _owners(name: str) -> Iterator[str]:
    """The modules that a parameter or a buffer is inside of, but the model itself."""
    return (name[:at] for at in dots_in(name))


def _owner(root: nn.Module, name: str) -> nn.Module:
    """The module that has the parameter, buffer or module of that name, empty ones where there are none."""
    found = root
    for part in name.split(".")[:-1]:
        inner = getattr(found, part, None)
        if inner is None:
            inner = nn.Module()
            found.add_module(part, inner)
        found = inner
    return found


def tied_in(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(own) for own in names.values())
