"""GroupGenerator: which workers average together next, as a pure state machine.

The live coordinator and the simulation tell the same object what happens and carry out what it answers. It has no clock
and no chance but from a seed: the same events give the same groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Worker = int


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
