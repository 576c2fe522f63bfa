"""Usage: which parameters got a gradient in a backward, here and on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway.strategies.data_parallel.channels.communication import Job
from headway.strategies.data_parallel.decoupled.parameter_state import ParameterState

if TYPE_CHECKING:
    from headway.strategies.data_parallel.decoupled.engine import Engine


class Usage:
    """One backward's uses. Ranks tell each other only where parameters may go unused."""

    def __init__(self, slots: Sequence[ParameterState]) -> None:
        self._index = {slot: index for index, slot in enumerate(slots)}
        self._used: set[ParameterState] = set()
        self._counts: torch.Tensor | None = None
        self._job: Job | None = None

    def restart(self) -> None:
        """A new backward begins."""
        self._used.clear()
        self._job = None

    def used(self, slot: ParameterState) -> bool:
        """Note a gradient; whether it is the slot's first in this backward."""
        first = slot not in self._used
        self._used.add(slot)
        return first

    def unused(self) -> list[ParameterState]:
        """The slots without a gradient on this rank."""
        return [slot for slot in self._index if slot not in self._used]

    def share(self, engine: Engine) -> None:
        """Queue the exchange of uses, behind the backward's reduce-scatters."""
        # As under DDP, what was used in an earlier backward that was not reduced counts as well.
        used = [slot in self._used or slot.grad is not None for slot in self._index]
        counts = torch.tensor(used, dtype=torch.int32, device="cpu")
        self._counts = counts
        self._job = engine.submit(engine.all_reduce(counts))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What has to be done before ``anywhere`` can answer."""
        return () if self._job is None else (self._job,)

    def anywhere(self, slot: ParameterState) -> bool:
        """Whether any rank used ``slot``'s parameter; waits for the exchange where there is one."""
        if self._job is None:
            return True
        self._job.done.wait()
        if self._job.error is not None:
            raise self._job.error
        assert self._counts is not None
        return bool(self._counts[self._index[slot]])
