"""One update of this rank's shard of a bucket: the optimizer's own code, over as few tensors as possible.

What an optimizer does in Python for each tensor is as long for a bias as for a large matrix, and mostly longer than the
arithmetic. Where an update goes by element, neighbouring pieces of a shard whose states are alike are one flat tensor
to it: a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway import torch_private
from headway.strategies.data_parallel.decoupled.shard import Piece, Shard, ShardedState, State

HyperParameters = dict[str, Any]
Members = list[tuple[Piece, int]]
"""Pieces to be updated, in their order in the shard, each with the index of its parameter group."""


class ShardUpdate:
    """An update that is done once, by ``run``. ``members`` tells then which pieces of the shard take part.

    ``gradients`` are those that are the script's own, in the place of what was reduced.
    """

    def __init__(
        self,
        shard: Shard,
        kept: ShardedState,
        hyper_parameters: Sequence[HyperParameters],
        members: Callable[[Shard], Members],
        gradients: Mapping[Piece, torch.Tensor],
    ) -> None:
        self._shard, self._kept = shard, kept
        self._hyper_parameters = hyper_parameters
        self._members = members
        self._gradients = gradients
        self._groups: list[dict[str, Any]] = []
        self.working: dict[Any, State] = {}  # the state that the optimizer's code sees
        self.draft: dict[Any, State] = {}  # the state of each updated piece, by its parameter

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups that the optimizer's code goes through."""
        return self._groups

    def run(self, step: Callable[[], object]) -> None:
        """Have ``step`` update the shard's values, and a draft of its state.

        The state before stays as it is: a rank that has yet to step may ask for it.
        """
        shard = self._shard
        if shard.pieces:
            targets = [piece.value for piece in shard.pieces]
            torch_private.foreach_copy(targets, [_elements_of(piece) for piece in shard.pieces])
        runs = _runs(self._members(shard), self._kept.of)
        lists: list[list[torch.Tensor]] = [[] for _ in self._hyper_parameters]
        parameters = []
        for run in runs:
            parameter = shard.parameter_of(run.pieces)
            # Not written over the reduced gradient, which a slower rank may still ask for.
            parameter.grad = self._gradient_of(run)
            self.working[parameter] = run.state
            lists[run.group].append(parameter)
            parameters.append(parameter)
        self._groups = [{**h, "params": p} for h, p in zip(self._hyper_parameters, lists, strict=True) if p]
        if runs:
            step()
        for run, parameter in zip(runs, parameters, strict=True):
            self.draft |= _split(run.pieces, self.working[parameter])

    def _gradient_of(self, run: _Run) -> torch.Tensor:
        if not any(piece in self._gradients for piece in run.pieces):
            return self._shard.gradient[run.pieces[0].first : run.pieces[-1].last]
        parts = [self._gradients.get(piece, piece.gradient) for piece in run.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring pieces of one parameter group, and a copy of their states as that of one tensor."""

    pieces: list[Piece]
    group: int
    state: State


def _runs(members: Members, states: Mapping[Any, State]) -> list[_Run]:
    found: list[tuple[list[Piece], int]] = []
    for piece, group in members:
        if found:
            pieces, before = found[-1]
            last = pieces[-1]
            if (
                before == group
                and last.last == piece.first
                and _alike(last, states[last.parameter], piece, states[piece.parameter])
            ):
                pieces.append(piece)
                continue
        found.append(([piece], group))
    return [_Run(pieces, group, _joined(pieces, states)) for pieces, group in found]


def _alike(one: Piece, state: State, other: Piece, others: State) -> bool:
    """Whether the states of two pieces differ in nothing but what they hold for each element."""
    if state.keys() != others.keys():
        return False
    for key, value in state.items():
        same = others[key]
        if value is same:
            continue
        if not isinstance(value, torch.Tensor) or not isinstance(same, torch.Tensor):
            if isinstance(value, torch.Tensor) or isinstance(same, torch.Tensor) or value != same:
                return False
        elif value.dtype != same.dtype or value.device != same.device:
            return False
        elif value.dim() == 0 and same.dim() == 0:
            # On a device the host would have to wait for the values.
            if value.device.type != "cpu" or value.item() != same.item():
                return False
        elif not (_by_element(value, one.numel) and _by_element(same, other.numel)):
            return False
    return True


def _by_element(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


def _joined(pieces: Sequence[Piece], states: Mapping[Any, State]) -> State:
    """A copy of the states of ``pieces`` as that of one tensor."""
    first = states[pieces[0].parameter]
    joined: State = {}
    for key, value in first.items():
        if len(pieces) > 1 and _by_element(value, pieces[0].numel):
            joined[key] = torch.cat([states[piece.parameter][key] for piece in pieces])
        else:
            joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return joined


def _split(pieces: Sequence[Piece], joined: State) -> dict[Any, State]:
    """The state of each piece, out of that of all."""
    if len(pieces) == 1:
        return {pieces[0].parameter: joined}
    begin, end = pieces[0].first, pieces[-1].last
    return {
        piece.parameter: {
            key: value[piece.first - begin : piece.last - begin] if _by_element(value, end - begin) else value
            for key, value in joined.items()
        }
        for piece in pieces
    }


def _elements_of(piece: Piece) -> torch.Tensor:
    return piece.owner.parameter.detach().reshape(-1)[piece.start : piece.end]
