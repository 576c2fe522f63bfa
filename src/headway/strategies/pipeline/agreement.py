"""What ranks say of themselves, compared: all of them refuse together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from headway.errors import UserError

Made = TypeVar("Made")


def differing(said: str, device: torch.device) -> int | None:
    """The first rank that says something else than rank 0; None where all say the same. Every rank calls it."""
    own = torch.frombuffer(bytearray(hashlib.sha256(said.encode()).digest()), dtype=torch.int64).to(device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return next((rank for rank, each in enumerate(found) if not torch.equal(each, found[0])), None)


def together(
    what: str, make: Callable[[], Made], describe: Callable[[Made], str], device: torch.device
) -> Made:
    """What ``make`` makes on this rank. Raises UserError on all ranks where it does on one, or makes something else.

    ``what`` says of an error on other ranks what they disagree about.
    """
    failure: UserError | None = None
    try:
        made = make()
        said = f"made {describe(made)}"
    except UserError as error:
        failure, said = error, f"refused {error}"
    other = differing(said, device)
    if failure is not None:
        raise failure
    if other is not None:
        raise UserError(
            what, got=f"an error, or something else, on rank {other} or rank 0", fix="Read what it says."
        )
    return made
