"""Costs of optimizers: memory for state, and the time of an update that is bound by memory bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer with ``states`` tensors per parameter, and ``temporaries`` more during an update.

    Temporaries exist because torch updates all parameters at once on accelerators. An update reads parameter, gradient
    and states, and writes parameter and states.
    """

    name: str
    states: int
    temporaries: int = 0

    @property
    def passes(self) -> int:
        """How often an update moves the bytes of all parameters."""
        return 3 + 2 * self.states

    def state_bytes(self, parameter_bytes: int) -> int:
        """The bytes of state for ``parameter_bytes`` of parameters."""
        return self.states * parameter_bytes

    def update_bytes(self, parameter_bytes: int) -> int:
        """The bytes of temporaries for ``parameter_bytes`` of parameters."""
        return self.temporaries * parameter_bytes

    def update_ns(self, parameter_bytes: int, bytes_per_s: float) -> int:
        """The time of one update of all parameters, in ns."""
        return round(self.passes * parameter_bytes / bytes_per_s * 1e9)


OPTIMIZERS = MappingProxyType(
    {
        optimizer.name: optimizer
        for optimizer in (Optimizer("sgd", 0), Optimizer("momentum", 1), Optimizer("adam", 2, 1))
    }
)
