"""Carries a collective out on tensors: by its chunk program, or by the process group itself."""

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

    ``peer`` is the other's rank in the job. A receive is done when its piece has arrived; a send when it was seen to
    have left, which nobody looks for before the rank has done everything else.
    """

    sends: bool
    peer: int
    size_bytes: int
    posted_ns: int
    done_ns: int


class _Wanted(threading.local):
    found: list[Transfer] | None = None


_wanted = _Wanted()


def wanted() -> list[Transfer] | None:
    """Where this thread's messages are to be put, if anybody wants them."""
    return _wanted.found


@contextmanager
def collected() -> Iterator[list[Transfer]]:
    """Collect the messages of what this thread runs inside the block."""
    before = _wanted.found
    found: list[Transfer] = []
    _wanted.found = found
    try:
        yield found
    finally:
        _wanted.found = before


# From torch 2.13 the older names warn of their deprecation.
_torch: Any = dist
_reduce_scatter = getattr(_torch, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor
_all_gather = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor


# The process group's own collectives, in the form of the live executor's: in place, on a flat tensor.
#
# And those of codecs, on the CPU, whose operands live no longer than the collective: straight on the backend.


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
    """``operand``, with the sum over the ranks of ``group`` in its place."""
    torch_private.sum_on_backend(operand, group)
    return operand


def gathered(operand: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What every rank of ``group`` brings, flat and of one size, as the rows of a new tensor, in the order of ranks."""
    rows = operand.new_empty(group.size() * operand.numel())
    torch_private.gather_on_backend(rows, operand.view(-1), group)
    return rows.view(group.size(), -1)


def exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row ``r`` of ``rows`` to rank ``r``; what it sends here is row ``r`` of the result."""
    received = torch.empty_like(rows)
    torch_private.exchange_on_backend(received, rows, group)
    return received


COLLECTIVES = {ALL_REDUCE: all_reduce, REDUCE_SCATTER: reduce_scatter, ALL_GATHER: all_gather}


class Prepared:
    """One rank's program bound to its tensors, to be run over and over.

    ``flat`` is a contiguous tensor of shape (numel,), the same numel and dtype on every rank; ``scratch`` is a
    contiguous tensor of its dtype and device with at least ``scratch_numel`` elements, which collectives that run
    one after the other may share. Both keep their memory for as long as this object is used.

    Two ranks have one connection a group for both directions, and Gloo announces a receive on the connection that its
    payload will come by: behind whatever this rank has sent and the link has yet to carry. The directions of
    collectives that follow each other then take turns. ``second``, another group of the same ranks, ends that: it
    carries what rank 1 sends. With more ranks it is not used.
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
            *(each.boxed() for each in _by_direction(program, group, second)),
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

        Messages carry ``tag``, which has to be the same on all ranks: those that are about to run different collectives
        wait for each other, up to the group's timeout, rather than take each other's messages for their own.

        All ranks of the group must run their programs in the same order, one at a time; programs on different
        groups may run at the same time. Arriving pieces are added in the dtype of the tensor.

        Raises RuntimeError where a peer closes its connection or outlasts the timeout of the group.
        """
        found = wanted()
        try:
            times = self._execute(*self._arguments, tag, found is not None)
        except RuntimeError as error:
            # The compiled loop puts a trace of itself before the reason.
            raise RuntimeError(str(error).rpartition("RuntimeError: ")[2].strip()) from error
        if found is not None:
            found += self._transfers(times)

    def _transfers(self, times: list[int]) -> Iterator[Transfer]:
        """What the loop's times say of each message."""
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
    """The groups that this rank sends by and receives by."""
    if second is None or program.world_size != 2:
        return group, group
    return (group, second) if program.rank == 0 else (second, group)


def run(program: ChunkProgram, flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Run this rank's ``program`` once; see ``Prepared``, which is faster where a buffer is used again."""
    Prepared(program, flat, group, scratch).run()


Collective = Callable[[torch.Tensor, dist.ProcessGroup, torch.Tensor], None]
"""Carries out one collective in place: (flat tensor, group, scratch)."""


def collective(algorithm: str, kind: str, rank: int, world_size: int, pieces: int = 1) -> Collective:
    """What carries a collective out on this rank.

    All do the same in place: after a reduce-scatter ``owned_chunk`` holds sums and the rest is undefined, an
    all-gather starts from it. ``pieces`` is for rings. The native halves need a numel that is a multiple of the world
    size. Raises PlanError for an unknown name.
    """
    if known_algorithm(algorithm, kind).is_library:
        return COLLECTIVES[kind]
    return partial(run, program_of(algorithm, kind, pieces)(rank, world_size))


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
        return Prepared(program, flat, group, scratch, second).run
    action = collective(selection.algorithm, selection.kind, group.rank(), group.size())

    def run(tag: int = 0) -> None:
        del tag  # the process group counts its own collectives
        action(flat, group, scratch)

    return run
