"""Which generator a coordinator asks: by name, with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.coordination.generator import GroupGenerator, Worker
from headway.coordination.generators.factory import generator_of, options_of
from headway.errors import PlanError
from headway.units import options_in


@dataclass(frozen=True)
class GeneratorChoice:
    """A generator by name, its options, and the seed of what it draws. Raises PlanError for what nobody knows."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        options_of(self.name, self.options)

    @classmethod
    def parse(cls, text: str, seed: int) -> GeneratorChoice:
        """The one that NAME, or NAME:OPTION=VALUE,…, means. Raises PlanError where it means none."""
        name, _, rest = text.partition(":")
        options = dict(options_in(rest, f"groups {name}", PlanError))
        return cls(name, options, seed)

    def make(self, hosts: Mapping[Worker, str]) -> GroupGenerator:
        """A new generator, for workers on ``hosts``, which may grow."""
        return generator_of(self.name, self.options, hosts, self.seed)

    def __str__(self) -> str:
        """Name, options and seed; the same for the same generator."""
        return f"{self.name} {options_of(self.name, self.options).model_dump_json()} seed {self.seed}"

    @property
    def text(self) -> str:
        """As ``parse`` takes it, without the seed."""
        options = ",".join(f"{name}={value}" for name, value in self.options.items() if value is not None)
        return f"{self.name}:{options}" if options else self.name
