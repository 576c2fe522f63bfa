"""``GroupGenerator``, a pure state machine that decides which workers average together next, and its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

Milliseconds = Annotated[float, Field(ge=0.001, le=3_600_000, allow_inf_nan=False)]


class GeneratorOptions(BaseModel):
    """Base of the options of generators."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MixingOptions(GeneratorOptions):
    """Options of generators that ensure that all workers mix."""

    mixing_window: int = Field(default=4, ge=1, le=1000)
    """How many of its most recent groups must connect each worker with all others, directly or through others."""


class PairOptions(MixingOptions):
    """Options of pairs."""

    neighbours: Literal["bipartite", "any"] = "bipartite"
    """bipartite pairs even workers with odd ones; any allows all pairs."""


class SizeOptions(MixingOptions):
    """Options of random groups."""

    group_size: int = Field(default=4, ge=2, le=1024)
    """Workers per group."""


class DrawingOptions(SizeOptions):
    """Options of groups that are drawn before all of their members arrive."""

    slowdown_threshold: int = Field(default=0, ge=0, le=1_000_000)
    """Leave out workers that have asked this many times less often than the drawing worker; 0 for none."""

    lateness_threshold: float = Field(default=0.0, ge=0, le=1000, allow_inf_nan=False)
    """Leave out workers that ask this much later after their group's end than the drawing worker, in units of the
    shortest iteration; 0 for none."""


class FirstComeOptions(SizeOptions):
    """Options of first-come groups."""

    deadline_ms: Milliseconds | None = None
    """How long workers wait for others to arrive. By default it adapts to the times between arrivals."""

    patience: float = Field(default=2.0, ge=0.1, le=100, allow_inf_nan=False)
    """The adaptive deadline as a multiple of the mean time that a group takes to fill."""

    least_ms: Milliseconds = 1.0
    """The shortest adaptive deadline."""

    most_ms: Milliseconds = 1000.0
    """The longest adaptive deadline, also used before any arrival is known."""

    @model_validator(mode="after")
    def _in_order(self) -> FirstComeOptions:
        if self.least_ms > self.most_ms:
            raise ValueError("least_ms is longer than most_ms")
        return self


Worker = int


class Grant(NamedTuple):
    """``members`` (ascending), all of which wait, average now. A single member continues with its own model.

    ``number`` counts the grants of a run. Groups that share a worker begin in the order of their numbers.
    """

    number: int
    members: tuple[Worker, ...]


class GroupGenerator(ABC):
    """Decides which workers average together next. Times are nanoseconds of a monotonic clock.

    The live coordinator and the simulation report the same events to it and carry out its answers. It has no clock and
    only seeded randomness: the same events give the same groups. A worker is free, waiting (it has asked), or in one
    running group. Every answer lists the groups that begin now. Each waiting worker is granted a group after a bounded
    number of events, and running groups never share a worker.
    """

    @abstractmethod
    def join(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """A worker begins to train, for the first time or again. Raises ValueError if it is already present."""

    @abstractmethod
    def leave(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """A worker has left or is considered dead; groups drawn with it that have not begun proceed without it.

        Its running group ends by ``ended``, as usual. Does nothing if the worker is absent.
        """

    @abstractmethod
    def ask(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """A free worker has finished an iteration and wants to average. Raises ValueError if it is not free."""

    @abstractmethod
    def ended(self, number: int, now_ns: int) -> Sequence[Grant]:
        """The group of a grant has averaged or given up: its members are free.

        Grants of one member end immediately and are not reported.
        """

    @property
    def wake_ns(self) -> int | None:
        """When ``wake`` must be called, unless another event comes first; None for never."""
        return None

    def wake(self, now_ns: int) -> Sequence[Grant]:
        """The time ``wake_ns`` has come."""
        del now_ns
        return ()

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Return the complete state as a JSON document for ``restore``."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a generator of the same class and options.

        Raises ValueError for any other state.
        """
