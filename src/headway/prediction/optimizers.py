"""What optimizers cost: state in addition to each parameter, and an update that does nothing but move memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``states`` tensors of a parameter's size, and ``passes`` over memory of that size in an update.

    ``temporaries`` more are there while it updates all parameters at once, as torch does on accelerators. An update
    reads parameter, gradient and states, and writes parameter and states.
    """

    name: str
    states: int
    temporaries: int = 0

    @property
    def passes(self) -> int:
        """How often the bytes of all parameters pass between memory and device."""
        return 3 + 2 * self.states

    def state_bytes(self, parameter_bytes: int) -> int:
        """What it holds for parameters of so many bytes."""
        return self.states * parameter_bytes

    def update_bytes(self, parameter_bytes: int) -> int:
        """What an update of parameters of so many bytes needs besides."""
        return self.temporaries * parameter_bytes

    def update_ns(self, parameter_bytes: int, bytes_per_s: float) -> int:
        """How long one update of all takes."""
        return round(self.passes * parameter_bytes / bytes_per_s * 1e9)


OPTIMIZERS = MappingProxyType(
    {each.name: each for each in (Optimizer("sgd", 0), Optimizer("momentum", 1), Optimizer("adam", 2, 1))}
)
