"""What carries a collective out on this rank: its chunk program on tensors, or the process group by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from headway.collectives import live, native
from headway.collectives.algorithms import known_algorithm, program_of
from headway.collectives.selection import Selection

Collective = Callable[[torch.Tensor, dist.ProcessGroup, torch.Tensor], None]
"""Carries out one collective in place: (flat tensor, group, scratch)."""


def collective(algorithm: str, kind: str, rank: int, world_size: int, pieces: int = 1) -> Collective:
    """What carries a collective out on this rank.

    All do the same in place: after a reduce-scatter ``owned_chunk`` holds sums and the rest is undefined, an
    all-gather starts from it. ``pieces`` is for rings. The native halves need a numel that is a multiple of the world
    size. Raises PlanError for an unknown name.
    """
    if known_algorithm(algorithm, kind).is_library:
        return native.COLLECTIVES[kind]
    return partial(live.run, program_of(algorithm, kind, pieces)(rank, world_size))


class Run(Protocol):
    """A collective bound to its tensors."""

    def __call__(self, tag: int = 0) -> None:
        """Run it. ``tag`` is the same on all ranks (``live.Prepared.run``)."""


def prepare(
    selection: Selection,
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    scratch: torch.Tensor,
    second: dist.ProcessGroup | None = None,
) -> Run:
    """What ``selection`` says bound to its tensors, to be called over and over at the least cost a call.

    It is called with a tag for its messages, the same on all ranks. ``second`` is for rings of two ranks. See
    ``live.Prepared`` for both.
    """
    if not known_algorithm(selection.algorithm, selection.kind).is_library:
        program = selection.program_of(group.rank(), group.size())
        return live.Prepared(program, flat, group, scratch, second).run
    action = collective(selection.algorithm, selection.kind, group.rank(), group.size())

    def run(tag: int = 0) -> None:
        del tag  # the process group counts its own collectives
        action(flat, group, scratch)

    return run
