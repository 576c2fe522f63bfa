"""One update of this rank's shard of a bucket: the optimizer's own code, over as few tensors as possible.

What an optimizer does in Python for each tensor is as long for a bias as for a large matrix, and mostly longer than the
arithmetic. Where an update goes by element, neighbouring pieces of a shard whose states are alike are one flat tensor
to it: a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from headway.strategies.decoupled.shard import (
    Members,
    Piece,
    Run,
    Shard,
    ShardedState,
    State,
    is_by_element,
)

HyperParameters = dict[str, Any]


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
        self.draft: dict[Piece, State] = {}  # the state of each updated piece

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups that the optimizer's code goes through."""
        return self._groups

    def run(self, step: Callable[[], object]) -> None:
        """Have ``step`` update the shard's values, and a draft of its state.

        The state before stays as it is: a rank that has yet to step may ask for it.
        """
        shard = self._shard
        shard.fetch()
        members = self._members(shard)
        runs = _runs(members, self._kept, shard.bucket.index)
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
        after = [Run(r.pieces, r.group, self.working[p]) for r, p in zip(runs, parameters, strict=True)]
        for run in after:
            self.draft |= run.parts
        self._kept.runs[shard.bucket.index] = members, after

    def _gradient_of(self, run: Run) -> torch.Tensor:
        if not any(piece in self._gradients for piece in run.pieces):
            return self._shard.gradient[run.pieces[0].first : run.pieces[-1].last]
        parts = [self._gradients.get(piece, piece.gradient) for piece in run.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(members: Members, kept: ShardedState, bucket: int) -> Sequence[Run]:
    """``members`` in runs with copies of their states.

    They are those of the update before where nothing has changed since, and no two that could be one.
    """
    before, runs = kept.runs.get(bucket, ((), ()))
    if members == before and _are_current(runs, kept.of):
        return [Run(r.pieces, r.group, {k: _copied(v) for k, v in r.state.items()}) for r in runs]
    return _joined_runs(members, kept.of)


def _are_current(runs: Sequence[Run], states: Mapping[Piece, State]) -> bool:
    unchanged = all(states[piece] is state for run in runs for piece, state in run.parts.items())
    return unchanged and not any(
        _may_join(one.pieces[-1], one.group, other.pieces[0], other.group, states)
        for one, other in pairwise(runs)
    )


def _joined_runs(members: Members, states: Mapping[Piece, State]) -> list[Run]:
    found: list[tuple[list[Piece], int]] = []
    for piece, group in members:
        if found:
            pieces, before = found[-1]
            if _may_join(pieces[-1], before, piece, group, states):
                pieces.append(piece)
                continue
        found.append(([piece], group))
    return [Run(pieces, group, _joined(pieces, states)) for pieces, group in found]


def _may_join(one: Piece, group: int, other: Piece, other_group: int, states: Mapping[Piece, State]) -> bool:
    return group == other_group and one.last == other.first and _alike(one, other, states)


def _alike(one: Piece, other: Piece, states: Mapping[Piece, State]) -> bool:
    """Whether the states of two pieces differ in nothing but what they hold for each element."""
    state, others = states[one], states[other]
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
        elif not (is_by_element(value, one.numel) and is_by_element(same, other.numel)):
            return False
    return True


def _joined(pieces: Sequence[Piece], states: Mapping[Piece, State]) -> State:
    """A copy of the states of ``pieces`` as that of one tensor."""
    several, numel = len(pieces) > 1, pieces[0].numel
    return {
        key: torch.cat([states[piece][key] for piece in pieces])
        if several and is_by_element(value, numel)
        else _copied(value)
        for key, value in states[pieces[0]].items()
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
