"""Loaded in a rank before a case: NCCL's collectives begin late and last long, as over a slow network.

With one rank NCCL does nothing at all, so that a missing wait would rarely be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.behaviour.decoupled import job

SPIN_CYCLES = 2_000_000  # about a millisecond


def slow_down() -> None:
    """Let a kernel spin on the stream of every native collective, before and behind it."""
    from headway.collectives import live

    for kind, collective in list(live.COLLECTIVES.items()):

        def slowed(flat: Any, group: Any, scratch: Any, collective: Any = collective) -> None:
            torch.cuda._sleep(SPIN_CYCLES)
            collective(flat, group, scratch)
            torch.cuda._sleep(SPIN_CYCLES)

        live.COLLECTIVES[kind] = slowed


_wrap = job.wrap
_slowed: list[bool] = []


def _wrap_slowed(module: Any, mode: str, **options: Any) -> Any:
    if mode in (job.GRADIENTS, job.PARAMETERS) and not _slowed:
        _slowed.append(True)
        slow_down()
    return _wrap(module, mode, **options)


job.wrap = _wrap_slowed
