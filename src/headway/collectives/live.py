"""The live executor: runs a chunk program on point-to-point messages of ``torch.distributed``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from headway.collectives.program import ChunkProgram, chunk_bounds


def scratch_numel(numel: int, chunks: int) -> int:
    """How many elements ``run`` needs as scratch for a tensor of ``numel`` elements: the largest chunk."""
    return -(-numel // chunks)


def run(program: ChunkProgram, flat: torch.Tensor, group: dist.ProcessGroup, scratch: torch.Tensor) -> None:
    """Run this rank's ``program`` in place on ``flat``, and return when the rank has done its part.

    ``flat`` is a contiguous tensor of shape (numel,), the same numel and dtype on every rank; ``scratch`` has
    its dtype and at least ``scratch_numel`` elements. All ranks of ``group`` must run their programs of one
    collective in the same order. Arriving chunks are added in the dtype of ``flat``. Empty chunks are not sent.

    Raises RuntimeError where a peer closes its connection or outlasts the timeout of ``group``.
    """
    assert flat.dim() == 1
    assert flat.is_contiguous()
    assert program.world_size == group.size()
    bounds = chunk_bounds(flat.numel(), program.chunks)
    for step in program.rounds:
        outgoing = flat[slice(*bounds[step.send_chunk])]
        incoming = flat[slice(*bounds[step.receive_chunk])]
        landing = scratch[: incoming.numel()] if step.reduce else incoming
        receiving = sending = None
        if incoming.numel():
            receiving = dist.irecv(landing, group=group, group_src=step.receive_from)
        if outgoing.numel():
            sending = dist.isend(outgoing, group=group, group_dst=step.send_to)
        if receiving is not None:
            receiving.wait()
            if step.reduce:
                incoming.add_(landing)
        if sending is not None:
            sending.wait()
