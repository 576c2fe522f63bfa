"""State shared by all generators: which workers are present and waiting, and which groups run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.strategies.chance import Chance
from headway.strategies.partial_all_reduce.generators.generator import (
    GeneratorOptions,
    Grant,
    GroupGenerator,
    Worker,
)

O = TypeVar("O", bound=GeneratorOptions)  # noqa: E741
Count = Annotated[int, Field(ge=0)]


class RunningGroup(BaseModel):
    """A group that is averaging. ``gone`` are members that left since; they may have rejoined."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: Count
    members: tuple[Count, ...]
    gone: tuple[Count, ...] = ()


class State(BaseModel):
    """Serialised state of a generator. Generators with more state derive from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generator: str
    options: dict[str, Any]
    seed: int
    drawn_numbers: Count
    next_number: Count
    present: tuple[Count, ...]
    waiting: tuple[tuple[Count, int], ...]
    running: tuple[RunningGroup, ...]

    @model_validator(mode="after")
    def _one_place_each(self) -> Self:
        """Check that no worker waits twice, waits while absent, or is in two running groups."""
        waiting = [worker for worker, _ in self.waiting]
        members = [worker for group in self.running for worker in group.members]
        inside = [worker for group in self.running for worker in group.members if worker not in group.gone]
        numbers = [group.number for group in self.running]
        if (
            len(set(waiting)) < len(waiting)
            or len(set(members)) < len(members)
            or len(set(numbers)) < len(numbers)
            or not set(waiting) <= set(self.present)
            or set(waiting) & set(inside)
            or not set(inside) <= set(self.present)
            or any(number >= self.next_number for number in numbers)
        ):
            raise ValueError("a worker is in two places, or group numbers are not unique")
        return self


class Attendance(GroupGenerator, Generic[O]):
    """Base of generators: tracks workers and groups; subclasses implement the rule in ``_drawn_now``.

    ``hosts`` maps workers to hosts. It is read whenever groups are drawn, so workers can be added before they join; a
    worker that is not in it counts as being on its own host.
    """

    name: ClassVar[str]
    state_class: ClassVar[type[State]] = State

    def __init__(self, options: O, hosts: Mapping[Worker, str], seed: int) -> None:
        self.options, self.hosts = options, hosts
        self.chance = Chance(seed)
        self.present: set[Worker] = set()
        self.waiting: dict[Worker, int] = {}  # since when (ns), in the order of arrival
        self.running: dict[int, RunningGroup] = {}
        self._runs_in: dict[Worker, int] = {}  # by number
        self._next_number = 0

    @abstractmethod
    def _drawn_now(self, now_ns: int) -> Iterable[Sequence[Worker]]:
        """Yield the groups that begin now, in order; all of their members satisfy ``_is_ready``."""

    def _on_ask(self, worker: Worker, now_ns: int) -> None:
        """Called when a worker starts to wait."""

    def _on_leave(self, worker: Worker) -> None:
        """Called when a worker has left."""

    def _on_grant(self, members: tuple[Worker, ...]) -> None:
        """Called when a group begins, or a worker continues alone."""

    def _on_freed(self, worker: Worker, now_ns: int) -> None:
        """Called when the group of a worker has ended; the worker may have left."""

    def join(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """Add a worker. Raises ValueError if it is already present."""
        if worker in self.present:
            raise ValueError(f"worker {worker} has joined already")
        self.present.add(worker)
        return self._grants(now_ns)

    def leave(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """Remove a worker; its running group continues."""
        if worker not in self.present:
            return ()
        self.present.discard(worker)
        self.waiting.pop(worker, None)
        if self._is_inside(worker):
            group = self.running[self._runs_in[worker]]
            gone = tuple(sorted((*group.gone, worker)))
            self.running[group.number] = group.model_copy(update={"gone": gone})
        self._on_leave(worker)
        return self._grants(now_ns)

    def ask(self, worker: Worker, now_ns: int) -> Sequence[Grant]:
        """Let a worker wait for a group. Raises ValueError if it is absent, already waiting, or in a running group."""
        if worker not in self.present:
            raise ValueError(f"worker {worker} asks and has not joined")
        if worker in self.waiting or self._is_inside(worker):
            raise ValueError(f"worker {worker} asks and is not free")
        self.waiting[worker] = now_ns
        self._on_ask(worker, now_ns)
        return self._grants(now_ns)

    def ended(self, number: int, now_ns: int) -> Sequence[Grant]:
        """Free the members of a group. Raises ValueError if no such group is running."""
        if (group := self.running.pop(number, None)) is None:
            raise ValueError(f"no group {number} runs")
        for worker in group.members:
            del self._runs_in[worker]
            self._on_freed(worker, now_ns)
        return self._grants(now_ns)

    def wake(self, now_ns: int) -> Sequence[Grant]:
        """Check again whether a group can begin."""
        return self._grants(now_ns)

    def state(self) -> Mapping[str, Any]:
        """Return the complete state as a JSON document."""
        return self.state_class(**self._snapshot()).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises ValueError for a state of another generator or with other options."""
        restored = self.state_class.model_validate(state)
        if (restored.generator, restored.options) != (self.name, self.options.model_dump(mode="json")):
            raise ValueError(f"the state belongs to {restored.generator} with {restored.options}")
        self._take(restored)

    def _snapshot(self) -> dict[str, Any]:
        return {
            "generator": self.name,
            "options": self.options.model_dump(mode="json"),
            "seed": self.chance.seed,
            "drawn_numbers": self.chance.count,
            "next_number": self._next_number,
            "present": tuple(sorted(self.present)),
            "waiting": tuple(self.waiting.items()),
            "running": tuple(self.running.values()),
        }

    def _take(self, state: Any) -> None:
        self.chance = Chance(state.seed, state.drawn_numbers)
        self._next_number = state.next_number
        self.present = set(state.present)
        self.waiting = dict(state.waiting)
        self.running = {group.number: group for group in state.running}
        self._runs_in = {worker: group.number for group in state.running for worker in group.members}

    def _is_inside(self, worker: Worker) -> bool:
        """Whether the worker is in a running group that it has not left."""
        number = self._runs_in.get(worker)
        return number is not None and worker not in self.running[number].gone

    def _is_ready(self, worker: Worker) -> bool:
        """Whether the worker waits and is not in a running group from before it rejoined."""
        return worker in self.waiting and worker not in self._runs_in

    def _grants(self, now_ns: int) -> Sequence[Grant]:
        grants = []
        for group in self._drawn_now(now_ns):
            members = tuple(sorted(group))
            assert members
            assert all(map(self._is_ready, members)), "a group begins when all of its members wait"
            number, self._next_number = self._next_number, self._next_number + 1
            for worker in members:
                del self.waiting[worker]
            if len(members) > 1:
                self.running[number] = RunningGroup(number=number, members=members)
                self._runs_in |= dict.fromkeys(members, number)
            self._on_grant(members)
            grants.append(Grant(number, members))
        return grants
