"""Cases: how long messages of a paced pipeline take against its forwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineCase:
    """``stages`` hosts with a stage each, whose forward sleeps for ``forward_ms`` and its backward for twice that.

    A message of ``size_bytes`` at ``rate_mbit`` takes ``ratio`` times as long as a forward, but for the links' bursts.
    """

    name: str
    ratio: float
    stages: int = 4
    micro_batches: int = 8
    forward_ms: float = 40.0
    rate_mbit: float = 100.0

    @property
    def size_bytes(self) -> int:
        """A message, of whole floats."""
        return round(self.ratio * self.forward_ms / 1e3 * self.rate_mbit * 1e6 / 8) // 4 * 4


CASES = {
    case.name: case
    for case in (
        PipelineCase("quiet", 0.25),
        PipelineCase("half", 0.5),
        PipelineCase("even", 1.0),
        PipelineCase("busy", 1.5),
        PipelineCase("even-m16", 1.0, micro_batches=16),
        PipelineCase("even-s2", 1.0, stages=2),
    )
}
QUICK = ("even-s2",)
