"""What does the steps of a wrapped model, and how one runtime gives way to another between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from headway.errors import CommunicationError
from headway.strategies.base import Strategy

ACTING = "_headway_acting"


class Runtime(Protocol):
    """What a wrapper that changes runtimes asks of the one that does the steps.

    It gives way only where ``check_settled`` raises nothing, on every rank at the same point of the script. The next
    one has to know what is ``accumulated`` then.
    """

    @property
    def strategy(self) -> Strategy:
        """What it trains under."""

    @property
    def reductions(self) -> int:
        """How many backwards it has reduced, as far as that is known without a look at gradients."""

    @property
    def reducer(self) -> Any:
        """What torch's pipelines ask for before the last backward of a stage."""

    @property
    def accumulated(self) -> frozenset[int]:
        """The identities of parameters whose gradients a backward may have added to that was not reduced."""

    def check_settled(self) -> None:
        """Raise what went wrong, or RuntimeError or UnsupportedError where a backward has not ended as it should."""

    def join_hook(self, **options: Any) -> JoinHook:
        """What a rank does under ``join()`` while it has no inputs left and others have. Collective."""


class Changes:
    """Changes of the runtime of one model: nothing is trained any more where one breaks off half-way.

    Gradients might stay on their ranks then.
    """

    def __init__(self) -> None:
        self._half_way = False

    @contextmanager
    def of(self, runtime: Runtime) -> Iterator[None]:
        """``runtime`` is being changed or replaced. Raises as its ``check_settled``, and changes nothing then."""
        self.check_ended()
        runtime.check_settled()
        self._half_way = True
        yield
        self._half_way = False

    def check_ended(self) -> None:
        """Raise CommunicationError where a change broke off."""
        if self._half_way:
            raise CommunicationError(
                f"rank {dist.get_rank()}: a change of the communication plan broke off half-way, so gradients would no "
                "longer be averaged. The error that ended it was raised before this one: see what it says (as of "
                "memory), and restart the job from its last checkpoint, with a plan instead of tuning if it is memory."
            )


def acting(wrapped: Any) -> Any:
    """The wrapped model that does the steps of ``wrapped`` at the moment: itself, where it has no other runtime."""
    return getattr(wrapped, ACTING, wrapped)
