"""What a rank keeps for error feedback, to be saved with a checkpoint and loaded again: every rank its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from headway.errors import UserError
from headway.strategies.ddp.compressed import Compressing
from headway.strategies.ddp.wire import compressing_of
from headway.strategies.live.checksum import checksum

KEPT, REMEMBERED, WORLD_SIZE = "kept.", "remembered.", "world_size"


def compression_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank keeps of gradients that were not sent, and what codecs remember, by the names of parameters.

    It is this rank's own: save it for each rank, with the model and the optimizer, between two steps. A job that goes
    on without it loses what one step has left out, and no more. Raises UserError for a model that sends its gradients
    as they are.
    """
    compressing = _compressing(model)
    compressing.forget_what_was_skipped()
    state = {WORLD_SIZE: torch.tensor(compressing.world_size)}
    state |= {KEPT + compressing.names[key]: own for key, own in compressing.feedback.kept().items()}
    memory = compressing.feedback.memory
    return state | {REMEMBERED + compressing.names[key]: own.clone() for key, own in memory.items()}


def load_compression_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Go on from ``state``, which ``compression_state`` gave the same rank of a job of as many ranks. Collective.

    Raises UserError, on all ranks, where it does not fit the model or the number of ranks, or where ranks remember
    different things: they would part.
    """
    compressing = _compressing(model)
    key_of = {name: key for key, name in enumerate(compressing.names)}
    sizes = {name: p.numel() for name, p in _inner(model).named_parameters() if name in key_of}
    problem = _misfit(state, sizes, compressing.world_size)
    kept = {key_of[name]: own for name, own in _below(KEPT, state).items() if not problem}
    memory = {key_of[name]: own for name, own in _below(REMEMBERED, state).items() if not problem}
    own = checksum(memory[key] for key in sorted(memory))
    # The largest and the smallest of each in one: negated, the one is the other.
    told = torch.tensor([bool(problem), own, -own], dtype=torch.int64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=compressing.group)
    if bool(told[0]):
        raise UserError(
            "the state of compression does not fit", got=problem or "that of another rank does not"
        )
    if int(told[1]) != -int(told[2]):
        raise UserError(
            "the states of compression are of different steps, or of different ranks' jobs",
            expected="what all ranks saved after the same step",
        )
    compressing.feedback.restore(kept, memory)


def _misfit(state: Mapping[str, torch.Tensor], sizes: Mapping[str, int], world_size: int) -> str:
    of = state.get(WORLD_SIZE)
    if of is None or int(of) != world_size:
        return (
            f"the state of a job of {'unknown' if of is None else int(of)} ranks, this one has {world_size}"
        )
    kept, names = _below(KEPT, state), {*_below(KEPT, state), *_below(REMEMBERED, state)}
    unknown = sorted(names - sizes.keys())
    if unknown:
        return f"a state for {unknown[0]}, which the model does not train"
    wrong = [name for name, own in kept.items() if own.numel() != sizes[name]]
    return f"{kept[wrong[0]].numel()} elements for {wrong[0]}, which has {sizes[wrong[0]]}" if wrong else ""


def _below(prefix: str, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): own for name, own in state.items() if name.startswith(prefix)}


def _inner(model: nn.Module) -> nn.Module:
    inner = model.module
    assert isinstance(inner, nn.Module)
    return inner


def _compressing(model: nn.Module) -> Compressing:
    found = compressing_of(model)
    if found is None:
        raise UserError(
            "the model sends its gradients as they are", got=type(model).__name__,
            expected="a model wrapped by a plan with wire, on the CPU, of more than one rank",
        )  # fmt: skip
    return found
