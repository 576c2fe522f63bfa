"""Runs collectives on tensors: by their chunk programs, or by the process group itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from headway import torch_private
from headway.collectives import executor
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, known_algorithm, program_of
from headway.collectives.program import ChunkProgram, chunk_bounds, owned_chunk, piece_bounds
from headway.collectives.selection import Selection


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of this rank. Times are ``time.monotonic_ns()``.

    ``peer`` is the peer's rank in the job. A receive is done when its piece has arrived. A send is done when it is known
    to have left, which is only checked after all other work of the rank.
    """

    sends: bool
    peer: int
    size_bytes: int
    posted_ns: int
    done_ns: int


class _Wanted(threading.local):
    transfers: list[Transfer] | None = None


_wanted = _Wanted()


def wanted() -> list[Transfer] | None:
    """The list that collects this thread's messages, or None."""
    return _wanted.transfers


@contextmanager
def collected() -> Iterator[list[Transfer]]:
    """Collect the messages that this thread's collectives exchange inside the block."""
    before = _wanted.transfers
    transfers: list[Transfer] = []
    _wanted.transfers = transfers
    try:
        yield transfers
    finally:
        _wanted.transfers = before


# The older names are deprecated from torch 2.13 on.
_torch: Any = dist
_reduce_scatter = getattr(_torch, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor
_all_gather = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor


# The process group's own collectives, in place on a flat tensor like those of the live executor, and the collectives of
# codecs, which call the backend directly because their operands do not outlive the collective.


def all_reduce(flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Sum ``flat`` of shape (numel,) over the ranks of ``group``."""
    dist.all_reduce(flat, group=group)


def reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Sum this rank's chunk of ``flat`` over the ranks of ``group``; its numel is a multiple of their number."""
    _reduce_scatter(_own_chunk(flat, group), flat, group=group)


def all_gather(flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Bring every rank's chunk of ``flat`` to all of ``group``; its numel is a multiple of their number."""
    _all_gather(flat, _own_chunk(flat, group), group=group)


def _own_chunk(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rank, world_size = group.rank(), group.size()
    assert flat.numel() % world_size == 0
    return flat[slice(*chunk_bounds(flat.numel(), world_size)[owned_chunk(rank, world_size)])]


def summed(operand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum ``operand`` in place over the ranks of ``group``, and return it."""
    torch_private.sum_on_backend(operand, group)
    return operand


def gathered(operand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather the flat operands of all ranks (of one size) as the rows of a new tensor, in rank order."""
    rows = operand.new_empty(group.size() * operand.numel())
    torch_private.gather_on_backend(rows, operand.view(-1), group)
    return rows.view(group.size(), -1)


def exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all: send row ``r`` of ``rows`` to rank ``r``; row ``r`` of the result comes from rank ``r``."""
    received = torch.empty_like(rows)
    torch_private.exchange_on_backend(received, rows, group)
    return received


COLLECTIVES = {ALL_REDUCE: all_reduce, REDUCE_SCATTER: reduce_scatter, ALL_GATHER: all_gather}


class Prepared:
    """One rank's program bound to its tensors, ready to run repeatedly.

    ``flat`` is a contiguous tensor of shape (numel,), the same numel and dtype on every rank; ``scratch`` is a
    contiguous tensor of its dtype and device with at least ``scratch_numel`` elements, which consecutive collectives
    may share. Both must keep their memory while this object is in use.

    Two ranks have one connection per group for both directions, and Gloo announces a receive on that connection, behind
    everything that this rank has sent but the link has not carried yet. The directions of consecutive collectives then
    alternate. ``second``, another group of the same ranks, avoids that: it carries what rank 1 sends. With more than two
    ranks it is not used.
    """

    def __init__(
        self,
        program: ChunkProgram,
        flat: torch.Tensor,
        group: dist.ProcessGroup,
        scratch: torch.Tensor,
        second: dist.ProcessGroup | None = None,
    ) -> None:
        assert flat.dim() == scratch.dim() == 1
        assert flat.is_contiguous()
        assert scratch.is_contiguous()
        assert flat.dtype == scratch.dtype
        assert program.world_size == group.size()
        assert program.rank == group.rank()
        numel, chunks = flat.numel(), program.chunks
        slot = program.slot_numel(numel)
        assert scratch.numel() >= program.scratch_slots * slot
        flat, scratch = flat.detach(), scratch.detach()
        bounds = piece_bounds(numel, chunks, program.pieces)

        def view(piece: int, run: int) -> torch.Tensor:
            return flat[bounds[piece][0] : bounds[piece + run - 1][1]]

        nothing = flat[:0]
        landings, targets = [], []
        for number, step in enumerate(program.steps):
            place = view(step.receive_piece, step.received)
            start = number % program.lookahead * slot
            landings.append(scratch[start : start + place.numel()] if step.reduce else place)
            targets.append(place if step.reduce else nothing)
        self._execute = executor.compiled()
        self._arguments = (
            *(direction.boxed() for direction in _by_direction(program, group, second)),
            [view(step.send_piece, step.run) for step in program.steps],
            [step.send_to for step in program.steps],
            [step.send_after for step in program.steps],
            landings,
            [step.receive_from for step in program.steps],
            targets,
            program.lookahead,
        )
        self._program, self._numel, self._item_bytes = program, numel, flat.element_size()
        self._ranks = dist.get_process_group_ranks(group)

    def run(self, tag: int = 0) -> None:
        """Run this rank's program in place, and return when the rank has done its part.

        Messages carry ``tag``, which must be the same on all ranks: ranks that run different collectives then wait for
        each other, up to the group's timeout, instead of mixing up messages.

        All ranks of the group must run their programs in the same order, one at a time; programs on different groups may
        run concurrently. Arriving pieces are added in the dtype of the tensor.

        Raises RuntimeError if a peer closes its connection, or on the timeout of the group.
        """
        received = wanted()
        try:
            times = self._execute(*self._arguments, tag, received is not None)
        except RuntimeError as error:
            # TorchScript puts its own trace before the reason.
            raise RuntimeError(str(error).rpartition("RuntimeError: ")[2].strip()) from error
        if received is not None:
            received += self._transfers(times)

    def _transfers(self, times: list[int]) -> Iterator[Transfer]:
        """Turn the times of ``execute`` into transfers."""
        program = self._program
        bounds = piece_bounds(self._numel, program.chunks, program.pieces)
        count = len(program.steps)

        def size_bytes(piece: int, run: int) -> int:
            return (bounds[piece + run - 1][1] - bounds[piece][0]) * self._item_bytes

        for number, step in enumerate(program.steps):
            receive_posted, receive_done, send_posted, send_done = times[number::count]
            if receive_posted:
                received_bytes = size_bytes(step.receive_piece, step.received)
                peer = self._ranks[step.receive_from]
                yield Transfer(False, peer, received_bytes, receive_posted, receive_done)
            if send_posted:
                sent_bytes = size_bytes(step.send_piece, step.run)
                yield Transfer(True, self._ranks[step.send_to], sent_bytes, send_posted, send_done)


def _by_direction(
    program: ChunkProgram, group: dist.ProcessGroup, second: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups that this rank sends on and receives on."""
    if second is None or program.world_size != 2:
        return group, group
    return (group, second) if program.rank == 0 else (second, group)


def run(program: ChunkProgram, flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Run this rank's ``program`` once; ``Prepared`` is faster for buffers that are used again."""
    Prepared(program, flat, group, scratch).run()


Collective = Callable[[torch.Tensor, dist.ProcessGroup, torch.Tensor], None]
"""Carries out one collective in place: (flat tensor, group, scratch)."""


def collective(algorithm: str, kind: str, rank: int, world_size: int, pieces: int = 1) -> Collective:
    """A function that runs the collective on this rank, in place.

    After a reduce-scatter, ``owned_chunk`` holds sums and the rest is undefined; an all-gather starts from it. ``pieces``
    is for rings. The native halves need a numel that is a multiple of the world size. Raises PlanError for an unknown
    name.
    """
    if known_algorithm(algorithm, kind).is_library:
        return COLLECTIVES[kind]
    return partial(run, program_of(algorithm, kind, pieces)(rank, world_size))


class Run(Protocol):
    """A collective bound to its tensors."""

    def __call__(self, tag: int = 0) -> None:
        """Run the collective. ``tag`` is the same on all ranks (``Prepared.run``)."""


def prepare(
    selection: Selection,
    flat: torch.Tensor,
    group: dist.ProcessGroup,
    scratch: torch.Tensor,
    second: dist.ProcessGroup | None = None,
) -> Run:
    """Bind the collective of ``selection`` to its tensors, so that repeated calls are cheap.

    Call the result with a tag for its messages, the same on all ranks. ``second`` is for rings of two ranks. See
    ``Prepared`` for both.
    """
    if not known_algorithm(selection.algorithm, selection.kind).is_library:
        program = selection.program_of(group.rank(), group.size())
        return Prepared(program, flat, group, scratch, second).run
    action = collective(selection.algorithm, selection.kind, group.rank(), group.size())

    def run(tag: int = 0) -> None:
        del tag  # the process group counts its own collectives
        action(flat, group, scratch)

    return run
