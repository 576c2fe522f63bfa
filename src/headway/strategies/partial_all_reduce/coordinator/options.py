"""Options of a coordinator: how it serves workers, and which generator forms groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import PlanError, UserError
from headway.strategies.partial_all_reduce.coordinator.messages import MAX_WORKERS
from headway.strategies.partial_all_reduce.generators.generator import GroupGenerator, Worker
from headway.strategies.partial_all_reduce.generators.rules import generator_of, options_of
from headway.units import options_in

DEFAULT_LEASE_S = 10.0
MIN_LEASE_S = 0.2
MAX_LEASE_S = 24 * 3600.0
HANDSHAKE_S = 10.0
IDLE_S = 30.0
SPARE_CONNECTIONS = 64
"""Connections beyond one per worker, for workers that reconnect before their old connection is dropped."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """How a coordinator serves. Raises UserError if a value is out of range.

    ``lease_s``: a worker that is silent for this long is considered dead. ``handshake_s``: time limit of a connection's
    first message. ``idle_s``: how long a connection without a worker may stay open. ``journal``: file to resume from
    after a crash; without one, a restarted coordinator has no state. ``secret``: secret that workers must know.
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
                "lease out of range",
                got=f"{self.lease_s:g} s",
                expected=f"{MIN_LEASE_S:g} s to {MAX_LEASE_S:g} s",
            )
        if not 1 <= self.max_workers <= MAX_WORKERS:
            raise UserError("max_workers out of range", got=self.max_workers, expected=f"1 to {MAX_WORKERS}")


@dataclass(frozen=True)
class GeneratorChoice:
    """A generator by name, its options and its seed. Raises PlanError for unknown names or options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        options_of(self.name, self.options)

    @classmethod
    def parse(cls, text: str, seed: int) -> GeneratorChoice:
        """Parse NAME or NAME:OPTION=VALUE,…. Raises PlanError if it is invalid."""
        name, _, rest = text.partition(":")
        options = dict(options_in(rest, f"groups {name}", PlanError))
        return cls(name, options, seed)

    def make(self, hosts: Mapping[Worker, str]) -> GroupGenerator:
        """Create the generator; ``hosts`` maps workers to hosts and may grow."""
        return generator_of(self.name, self.options, hosts, self.seed)

    def __str__(self) -> str:
        """Name, options and seed: equal for equal generators."""
        return f"{self.name} {options_of(self.name, self.options).model_dump_json()} seed {self.seed}"

    @property
    def text(self) -> str:
        """The choice in the format of ``parse``, without the seed."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items() if value is not None)
        return f"{self.name}:{options}" if options else self.name
