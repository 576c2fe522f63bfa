"""Usage: which parameters got a gradient in a backward, here and on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.transport import BucketTransport
from headway.strategies.live.channels.communication import Job


class Usage:
    """One backward's uses of ``states``. Ranks tell each other only where parameters may go unused."""

    def __init__(self, states: Sequence[ParameterState], transport: BucketTransport) -> None:
        self._transport = transport
        self._index = {state: index for index, state in enumerate(states)}
        self._used: set[ParameterState] = set()
        self._counts: torch.Tensor | None = None
        self._job: Job | None = None

    def restart(self) -> None:
        """A new backward begins."""
        self._used.clear()
        self._job = None

    def used(self, state: ParameterState) -> bool:
        """Note a gradient; whether it is the parameter's first in this backward."""
        first = state not in self._used
        self._used.add(state)
        return first

    def unused(self) -> list[ParameterState]:
        """The parameters without a gradient on this rank."""
        return [state for state in self._index if state not in self._used]

    def unused_names(self) -> list[str]:
        """Their names."""
        return [state.name for state in self.unused()]

    def share(self) -> None:
        """Queue the exchange of uses, behind the backward's reduce-scatters."""
        # As under DDP, what was used in an earlier backward that was not reduced counts as well.
        used = [state in self._used or state.grad is not None for state in self._index]
        self._counts = torch.tensor(used, dtype=torch.int32, device="cpu")
        self._job = self._transport.submit(self._transport.all_reduce(self._counts))

    @property
    def jobs(self) -> tuple[Job, ...]:
        """What has to be done before ``anywhere`` can answer."""
        return () if self._job is None else (self._job,)

    def anywhere(self, state: ParameterState) -> bool:
        """Whether any rank used the parameter; waits for the exchange where there is one.

        Raises CommunicationError where it failed.
        """
        if self._job is None:
            return True
        self._transport.wait(self._job)
        assert self._counts is not None
        return bool(self._counts[self._index[state]])
