"""Generators of groups: which workers average together next, as pure state machines, and their options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

Milliseconds = Annotated[float, Field(ge=0.001, le=3_600_000, allow_inf_nan=False)]


class GeneratorOptions(BaseModel):
    """The options of a generator that has none; the others' are derived from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MixingOptions(GeneratorOptions):
    """Options of generators that see to it that all workers mix."""

    mixing_window: int = Field(default=4, ge=1, le=1000)
    """How many of its last groups have to connect each worker with all others, directly or by way of others."""


class PairOptions(MixingOptions):
    """Options of pairs."""

    neighbours: Literal["bipartite", "any"] = "bipartite"
    """Whom a worker averages with: bipartite draws one of the other half (even and odd numbers), any draws anyone."""


class SizeOptions(MixingOptions):
    """Options of random groups."""

    group_size: int = Field(default=4, ge=2, le=1024)
    """How many workers average together."""


class DrawingOptions(SizeOptions):
    """Options of groups that are drawn before all of their members have come."""

    slowdown_threshold: int = Field(default=0, ge=0, le=1_000_000)
    """Who has asked so many times less than the worker for which groups are drawn is left out; 0: nobody is."""

    lateness_threshold: float = Field(default=0.0, ge=0, le=1000, allow_inf_nan=False)
    """Who asks, after the end of its group, later than that worker does by so many of the shortest iterations is left
    out; 0: nobody is."""


class FirstComeOptions(SizeOptions):
    """Options of first-come groups."""

    deadline_ms: Milliseconds | None = None
    """How long who has come waits for more; by default it follows the times between arrivals."""

    patience: float = Field(default=2.0, ge=0.1, le=100, allow_inf_nan=False)
    """How many times as long as a group takes to fill in the mean the deadline is, where it follows."""

    least_ms: Milliseconds = 1.0
    """The shortest deadline, where it follows."""

    most_ms: Milliseconds = 1000.0
    """The longest deadline, where it follows; also the one before anything is known."""

    @model_validator(mode="after")
    def _in_order(self) -> FirstComeOptions:
        if self.least_ms > self.most_ms:
            raise ValueError("least_ms is longer than most_ms")
        return self


Worker = int


# GroupGenerator: which workers average together next, as a pure state machine.
#
# The live coordinator and the simulation tell the same object what happens and carry out what it answers. It has no clock
# and no chance but from a seed: the same events give the same groups.


class Grant(NamedTuple):
    """``members`` (ascending) average now: all of them have asked and wait. One member alone goes on as it is.

    ``number`` counts the grants of a run. Groups that share a worker begin in the order of their numbers.
    """

    number: int
    members: tuple[Worker, ...]


class GroupGenerator(ABC):
    """What every generator is told, and answers. Times are nanoseconds of one clock and never go back.

    A worker is free, waiting (it has asked), or in one group that runs. Every answer lists the groups that begin now.
    Whatever happens, each worker that waits is granted a group after a bounded number of events, and no two groups that
    run share a worker.
    """

    @abstractmethod
    def join(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """A worker begins to train, for the first time or again. Raises ValueError if it is there already."""

    @abstractmethod
    def leave(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """A worker has left, or is taken for dead; groups that were drawn with it and have not begun go on without it.

        A group of it that runs ends by ``ended``, as others do. Nothing happens where it is not there.
        """

    @abstractmethod
    def ask(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """A free worker has finished an iteration and wants to average. Raises ValueError if it is not free."""

    @abstractmethod
    def ended(self, number: int, now_ns: int) -> Sequence[Grant]:
        """The group of a grant has averaged, or given up: its members are free.

        A grant of one member has ended with its answer, and is not told of.
        """

    @property
    def wake_ns(self) -> int | None:
        """When ``wake`` has to be called, unless something else happens before; None: never."""
        return None

    def wake(self, now_ns: int) -> Sequence[Grant]:
        """The time ``wake_ns`` has come."""
        del now_ns
        return ()

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """All that it knows, as a JSON document: ``restore`` goes on from it."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what another one knew, of the same class and options.

        Raises ValueError where ``state`` is none of it.
        """
