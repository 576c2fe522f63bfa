"""The process group that a model is wrapped for: the one that was given, or the default one."""

from __future__ import annotations

import torch.distributed as dist

from headway.errors import UserError


def existing_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or the default one. Raises UserError where there is none, and where this process is no member."""
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group", expected="torch.distributed to be initialised",
            fix="Call torch.distributed.init_process_group('gloo') first, under torchrun.",
        )  # fmt: skip
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    if dist.get_rank(chosen) < 0:
        raise UserError("this process is not in the process group it was given")
    return chosen
