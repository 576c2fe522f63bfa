"""What-ifs: how a cluster and the recorded computation would differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.cluster import Cluster
from headway.errors import UserError
from headway.units import parse_factor

MAX_WORKERS = 65_536
LEAST_FACTOR = 1e-6
FORMS = "bandwidth=2x, latency=0.5x, compute=0.5x or workers=8"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Multipliers on what was recorded, and another number of workers.

    ``bandwidth`` multiplies link rates, ``latency`` link latencies, ``compute`` the time computation takes (0.5
    stands for devices twice as fast). Each worker keeps its batch when their number changes.
    """

    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    workers: int | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> WhatIf:
        """Read ``K=V`` texts; later ones multiply with earlier ones. Raises UserError for what has no meaning."""
        factors = {"bandwidth": 1.0, "latency": 1.0, "compute": 1.0}
        workers: int | None = None
        for text in texts:
            key, equals, value = text.partition("=")
            if equals and key == "workers":
                workers = _parse_workers(value)
            elif equals and key in factors:
                factors[key] *= parse_factor(value, f"--what-if {key}")
            else:
                raise UserError("--what-if cannot be read", got=repr(text), expected=FORMS)
        for key, factor in factors.items():
            if not LEAST_FACTOR <= factor <= 1 / LEAST_FACTOR:
                expected = f"{LEAST_FACTOR:g}x to {1 / LEAST_FACTOR:g}x in all"
                raise UserError(f"--what-if {key} is out of range", got=f"{factor:g}x", expected=expected)
        return cls(workers=workers, **factors)

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster under this what-if."""
        changed = cluster.scaled(bandwidth=self.bandwidth, latency=self.latency, host=self.compute)
        return changed if self.workers is None else changed.resized(self.workers)

    def describe(self) -> str:
        """Say in words what differs; empty where nothing does."""
        said = [
            f"{what} {factor:g} times the recorded"
            for what, factor in (
                ("bandwidth", self.bandwidth),
                ("latency", self.latency),
                ("compute time", self.compute),
            )
            if factor != 1.0
        ]
        if self.workers is not None:
            said.append(f"{self.workers} workers")
        return ", ".join(said)


def _parse_workers(value: str) -> int:
    if value.isdecimal() and 1 <= int(value) <= MAX_WORKERS:
        return int(value)
    raise UserError(
        "--what-if workers cannot be read", got=repr(value), expected=f"a number from 1 to {MAX_WORKERS}"
    )
