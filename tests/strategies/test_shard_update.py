"""Neighbouring pieces of a shard are updated as one tensor, and come out as if each were updated by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway import torch_private
from headway.strategies.decoupled.optimizers import StandIn
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.shard import Piece, ShardedState, ShardUpdate, Span
from headway.strategies.live.channels.streams import Streams

SIZES = (3, 5, 1, 4)
CPU = Streams(torch.device("cpu"))


class OwnShard:
    """As many pieces as ``SIZES``, each a whole parameter."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.bucket = SimpleNamespace(index=0)
        self.value = torch.zeros(sum(SIZES))
        self.gradient = torch.zeros(sum(SIZES))
        self.owners = [nn.Parameter(torch.randn(size, generator=drawn)) for size in SIZES]
        self.pieces: list[Piece] = []
        self.joined: list[int] = []
        for owner in self.owners:
            first = self.pieces[-1].last if self.pieces else 0
            holder: Any = SimpleNamespace(parameter=owner)
            whole: Any = self
            self.pieces.append(Piece(Span(holder, 0, len(owner), first), first, whole))

    def fetch(self) -> None:
        for piece in self.pieces:
            piece.value.copy_(piece.source().detach())

    def parameter_of(self, pieces: list[Piece]) -> nn.Parameter:
        self.joined.append(len(pieces))
        where = slice(pieces[0].first, pieces[-1].last)
        return pieces[0].parameter if len(pieces) == 1 else nn.Parameter(self.value[where])


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if name == "SGD" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **options)
    return made


def update(
    shard: OwnShard,
    kept: ShardedState,
    name: str,
    groups: list[int],
    absent: tuple[int, ...] = (),
    own: dict[Piece, torch.Tensor] | None = None,
) -> None:
    """One update; pieces are of the parameter groups ``groups``, and those ``absent`` take no part."""
    shard.joined.clear()
    optimizer = optimizer_of(name, [nn.Parameter(torch.zeros(1))])
    of_all = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    members = [(p, groups[i]) for i, p in enumerate(shard.pieces) if i not in absent]
    given: Any = shard
    due = ShardUpdate(given, kept, [of_all, of_all | {"lr": 0.01}], lambda _shard: members, own or {})
    stand_in = StandIn(optimizer, due.groups, due.working)
    due.run(lambda: torch_private.unhooked_step(type(optimizer))(stand_in))
    kept.commit(0, due.draft)
    with torch.no_grad():
        for owner, piece in zip(shard.owners, shard.pieces, strict=True):
            owner.copy_(piece.value)


@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"],
)
def test_as_if_each_were_updated_by_itself(name: str) -> None:
    """In two groups; one parameter is left out once, and is one step behind from then on."""
    shard, kept = OwnShard(), ShardedState(CPU)
    alone = [nn.Parameter(owner.detach().clone()) for owner in shard.owners]
    reference = [optimizer_of(name, [p]) for p in alone]
    reference[3].param_groups[0]["lr"] = 0.01
    for step, absent in enumerate(((), (), (1,), ())):
        shard.gradient.copy_(torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(10 + step)))
        own = {shard.pieces[0]: torch.ones(3)} if step == 1 else {}
        update(shard, kept, name, [0, 0, 0, 1], absent, own)
        assert len(shard.joined) == 2 or step >= 2
        for index, (piece, parameter) in enumerate(zip(shard.pieces, alone, strict=True)):
            if index not in absent:
                parameter.grad = own.get(piece, piece.gradient).clone()
                reference[index].step()
            torch.testing.assert_close(piece.value, parameter.detach(), rtol=1e-6, atol=1e-7)
    for piece, parameter, one in zip(shard.pieces, alone, reference, strict=True):
        found, expected = kept.of[piece], one.state[parameter]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-7)


def test_who_is_a_step_behind_is_updated_by_itself() -> None:
    shard, kept = OwnShard(), ShardedState(CPU)
    update(shard, kept, "Adam", [0, 0, 0, 0])
    assert shard.joined == [4]
    update(shard, kept, "Adam", [0, 0, 0, 0], (1,))
    assert shard.joined == [1, 2]
    update(shard, kept, "Adam", [0, 0, 0, 0])
    assert shard.joined == [1, 1, 2]


def test_states_that_are_alike_again_are_joined_again() -> None:
    """A state that was loaded has a count of steps for each parameter: what it says matters, not whose it is."""
    shard, kept = OwnShard(), ShardedState(CPU)
    update(shard, kept, "Adam", [0, 0, 0, 0])
    for piece in shard.pieces:
        kept.of[piece] = {key: value.clone() for key, value in kept.of[piece].items()}
    update(shard, kept, "Adam", [0, 0, 0, 0])
    assert shard.joined == [4]


def test_the_state_before_an_update_stays() -> None:
    shard, kept = OwnShard(), ShardedState(CPU)
    shard.gradient.fill_(1.0)
    update(shard, kept, "Adam", [0, 0, 0, 0])
    before = {piece: dict(kept.of[piece]) for piece in shard.pieces}
    copies = {piece: {key: value.clone() for key, value in state.items()} for piece, state in before.items()}
    update(shard, kept, "Adam", [0, 0, 0, 0])
    for piece in shard.pieces:
        for key, value in before[piece].items():
            assert torch.equal(value, copies[piece][key])
            assert kept.of[piece][key] is not value


def test_a_state_that_was_changed_since_is_taken_as_it_is() -> None:
    """What was loaded or written between two updates counts, although the pieces were one tensor in the last."""
    shard, kept = OwnShard(), ShardedState(CPU)
    shard.gradient.fill_(1.0)
    update(shard, kept, "SGD", [0, 0, 0, 0])
    changed = shard.pieces[1]
    kept.of[changed] = {"momentum_buffer": torch.full((SIZES[1],), 5.0)}
    before = shard.value.clone()
    update(shard, kept, "SGD", [0, 0, 0, 0])
    moved = before - shard.value
    for piece in shard.pieces:
        momentum = 0.9 * (5.0 if piece is changed else 1.0) + 1.0
        torch.testing.assert_close(
            moved[piece.first : piece.last], torch.full((piece.numel,), 0.05 * momentum)
        )


def test_a_script_may_write_to_parameters_between_updates() -> None:
    shard, kept = OwnShard(), ShardedState(CPU)
    update(shard, kept, "SGD", [0, 0, 0, 0])
    with torch.no_grad():
        shard.owners[2].fill_(7.0)
    update(shard, kept, "SGD", [0, 0, 0, 0])
    assert shard.pieces[2].value.item() == 7.0


def test_pieces_that_come_to_be_alike_are_joined() -> None:
    """One gets its momentum an update after the others."""
    shard, kept = OwnShard(), ShardedState(CPU)
    update(shard, kept, "SGD", [0, 0, 0, 0], (1,))
    update(shard, kept, "SGD", [0, 0, 0, 0])
    assert shard.joined == [1, 1, 2]
    update(shard, kept, "SGD", [0, 0, 0, 0])
    assert shard.joined == [4]


def test_a_count_of_steps_stays_one_where_parameters_have_no_dimension() -> None:
    kept = ShardedState(CPU)
    shard: Any = SimpleNamespace(
        value=torch.zeros(1), gradient=torch.zeros(1), bucket=SimpleNamespace(index=0)
    )
    owner = ParameterState("w", nn.Parameter(torch.tensor(1.0)))
    piece = Piece(Span(owner, 0, 1, 0), 0, shard)
    kept.absorb(owner, [piece], {"step": torch.tensor(3.0), "exp_avg": torch.tensor(2.0)})
    assert kept.of[piece]["step"].shape == ()
    assert kept.of[piece]["exp_avg"].shape == (1,)
