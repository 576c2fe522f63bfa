"""Injection: how ``DistributedDataParallel(...)`` in somebody's unmodified script becomes a strategy's runtime."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headway.strategies.base import Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

S = TypeVar("S", bound=Strategy)


class Injection(ABC, Generic[S]):
    """What is done in the place of the constructor of DistributedDataParallel, for a model that a plan was made for."""

    def wrapper(self) -> type[DistributedDataParallel] | None:
        """A subclass whose instances take the place of DistributedDataParallel's; None where these stay."""
        return None

    @abstractmethod
    def construct(
        self,
        init: Callable[..., None],
        wrapped: DistributedDataParallel,
        module: nn.Module,
        given: dict[str, Any],
        strategy: S,
    ) -> None:
        """Construct ``wrapped`` around ``module`` by its class's own constructor, ``init``, under ``strategy``.

        ``given`` are the other arguments of the script's, by name; what the strategy decides goes before them. Raises
        PlanError where the strategy does not fit the module, UnsupportedError where it would train wrongly.
        """
