"""All ranks of a compressed reduction in one process, in lockstep: the yardstick of the live runtime."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE
from headway.compression.codec import Codec, Exchange, Gradients, Reduced, Sent, Shape


def reduced(codec: Codec, ranks: Sequence[Gradients]) -> tuple[list[Reduced], list[Exchange]]:
    """What every rank ends with, and the collectives that it took."""
    reductions = [codec.reduce(each) for each in ranks]
    sent: list[Sent] = [next(each) for each in reductions]
    exchanges: list[Exchange] = []
    done: list[Reduced] = []
    while not done:
        results, size_bytes = _exchanged(sent)
        exchanges.append(Exchange(sent[0].kind, size_bytes))
        sent = []
        for reduction, result in zip(reductions, results, strict=True):
            try:
                sent.append(reduction.send(result))
            except StopIteration as stop:
                done.append(stop.value)
    assert not sent, "all ranks end together"
    return done, exchanges


def _exchanged(sent: Sequence[Sent]) -> tuple[list[torch.Tensor], int]:
    operands = [each.operand for each in sent]
    own_bytes = operands[0].numel() * operands[0].element_size()
    assert len({each.kind for each in sent}) == 1
    if sent[0].kind == ALL_REDUCE:
        total = operands[0].clone()
        for each in operands[1:]:
            total += each
        return [total.clone() for _ in operands], own_bytes
    if sent[0].kind == ALL_GATHER:
        rows = torch.stack([each.view(-1) for each in operands])
        return [rows.clone() for _ in operands], own_bytes * len(operands)
    return [torch.stack([each[rank] for each in operands]) for rank in range(len(operands))], own_bytes


class Simulation:
    """Training steps of all ranks: error feedback included. ``shapes`` are those of the bucket's parameters."""

    def __init__(self, codec: Codec, shapes: Sequence[Shape], world_size: int, dtype: torch.dtype) -> None:
        self.codec, self.shapes, self.world_size = codec, shapes, world_size
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        self.kept = [torch.zeros(numel, dtype=dtype) for _ in range(world_size)]
        self.memory: list[dict[int, torch.Tensor]] = [{} for _ in range(world_size)]
        self.keys = range(len(shapes))

    def step(self, flats: Sequence[torch.Tensor], keys: Sequence[int] | None = None) -> torch.Tensor:
        """The mean that all ranks get of ``flats``, one a rank."""
        ranks = [
            Gradients(
                flat + self.kept[rank],
                self.shapes,
                keys or self.keys,
                rank,
                self.world_size,
                self.memory[rank],
            )
            for rank, flat in enumerate(flats)
        ]
        done, _ = reduced(self.codec, ranks)
        if self.codec.feeds_back:
            self.kept = [each.kept.clone() for each in done]
        assert all(torch.equal(each.mean, done[0].mean) for each in done), "ranks would part"
        return done[0].mean
