"""How a coordinator serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.coordination.messages import MAX_WORKERS
from headway.errors import UserError

DEFAULT_LEASE_S = 10.0
MIN_LEASE_S = 0.2
MAX_LEASE_S = 24 * 3600.0
HANDSHAKE_S = 10.0
IDLE_S = 30.0
SPARE_CONNECTIONS = 64
"""Connections beyond one a worker: of those that come back before their last one is known to be gone."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How a coordinator serves. Raises UserError where a value is out of range.

    ``lease_s``: a worker that is silent for so long is taken for dead. ``handshake_s``: how long a connection may take
    to say who it is. ``idle_s``: how long one without a worker may stay open. ``journal``: where to go on after a
    crash; without one, a coordinator that comes back knows nothing. ``secret``: what workers have to know.
    """

    lease_s: float = DEFAULT_LEASE_S
    max_workers: int = MAX_WORKERS
    handshake_s: float = HANDSHAKE_S
    idle_s: float = IDLE_S
    journal: Path | None = None
    secret: bytes | None = None

    def __post_init__(self) -> None:
        if not MIN_LEASE_S <= self.lease_s <= MAX_LEASE_S:
            raise UserError(
                "lease out of range", got=f"{self.lease_s:g} s", expected=f"at least {MIN_LEASE_S:g} s"
            )
        if not 1 <= self.max_workers <= MAX_WORKERS:
            raise UserError("too many workers", got=self.max_workers, expected=f"1 to {MAX_WORKERS}")
