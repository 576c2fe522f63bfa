"""The live executor: runs a chunk program on point-to-point messages of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from headway.collectives import executor, transfers
from headway.collectives.program import ChunkProgram, piece_bounds


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
        found = transfers.wanted()
        try:
            times = self._execute(*self._arguments, tag, found is not None)
        except RuntimeError as error:
            # The compiled loop puts a trace of itself before the reason.
            raise RuntimeError(str(error).rpartition("RuntimeError: ")[2].strip()) from error
        if found is not None:
            found += self._transfers(times)

    def _transfers(self, times: list[int]) -> Iterator[transfers.Transfer]:
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
                yield transfers.Transfer(False, peer, received_bytes, receive_posted, receive_done)
            if send_posted:
                sent_bytes = size_bytes(step.send_piece, step.run)
                yield transfers.Transfer(True, self._ranks[step.send_to], sent_bytes, send_posted, send_done)


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
