"""Carries out one round of a worker: ask for a group, average in a copy, vote, and apply the mean if all members do.

P-Reduce of a group G replaces each member's tensors with the mean over G. As a matrix on the workers' models it is 1/|G|
inside G and the identity elsewhere, which is doubly stochastic: the mean over all workers is preserved. The coordinator
decides from the members' votes whether all of them apply the mean or none does.
"""

from __future__ import annotations

import enum
import json
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from headway import torch_private
from headway.errors import HeadwayError, UserError, one_line
from headway.rpc.frames import FrameError, endpoint
from headway.rpc.trusted import remaining_s
from headway.strategies.live.averaged import Flat, Layout
from headway.strategies.partial_all_reduce.coordinator.messages import Coordinator, GroupStart, Member
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer, Room, room_of

CAPACITY = 16
SETTLING_S = 0.5  # Gloo's threads must have let go of tensors before a context is destroyed

Identity = tuple[tuple[int, int], ...]


class LayoutError(UserError):
    """Members of a group do not average the same tensors."""


@dataclass(eq=False, slots=True)
class Context:
    """Gloo connections among the members of a group; ``made_for`` is the key of the first group that used them."""

    made_for: str
    size: int
    gloo: Any
    works: list[Any] = field(default_factory=list)

    def all_reduce(self, flat: torch.Tensor, deadline: float) -> None:
        """Sum ``flat`` over the members, in place. Raises RuntimeError, TimeoutError; ``flat`` is then undefined."""
        work = self.submit(flat)
        self.works.append(work)
        work.wait(timedelta(seconds=remaining_s(deadline)))
        self.works.remove(work)

    def submit(self, flat: torch.Tensor) -> Any:
        """Start to sum ``flat``; returns the work to wait for."""
        return self.gloo.allreduce([flat])

    @property
    def is_idle(self) -> bool:
        """Whether no work is in flight."""
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Result of meeting a group: its ``context``, and the iterations that the members have finished."""

    context: Context
    iterations: Sequence[int]


class RoomStore(Store):
    """Adapts a group's room to the store in which Gloo exchanges addresses."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room
        self._seen: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Publish an address."""
        self._room.put(f"gloo/{key}", value)

    def get(self, key: str) -> bytes:
        """Return a peer's address."""
        self.wait([key])
        return self._seen[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for peers' addresses, within the group's time limit."""
        del timeout
        if missing := [key for key in keys if key not in self._seen]:
            values = self._room.get([f"gloo/{key}" for key in missing])
            self._seen.update(zip(missing, values, strict=True))


class Contexts:
    """Creates and caches the Gloo contexts of one worker, up to ``capacity`` (least recently used out first).

    Each group has its own context, since a timeout closes all connections of a context. Members meet on the board of the
    first of them and report which context they still hold for the same members and incarnations: it is reused if all
    hold the same one. Connections use this worker's address. ``time_limit_s`` bounds every wait for a peer.
    """

    def __init__(
        self, member: Member, server: PeerServer, peers: Peers, time_limit_s: float, capacity: int = CAPACITY
    ) -> None:
        self._member, self._server, self._peers = member, server, peers
        self._timeout = timedelta(seconds=time_limit_s)
        self._capacity = capacity
        self._device: Any = None
        self._kept: OrderedDict[Identity, Context] = OrderedDict()
        self._retired: deque[tuple[float, Context]] = deque()

    @property
    def kept(self) -> int:
        """Number of cached contexts."""
        return len(self._kept)

    def meet(self, start: GroupStart, iteration: int, layout: str, deadline: float) -> Rendezvous:
        """Meet the other members of ``start`` and return a context to average on; ``keep`` caches it afterwards.

        Raises LayoutError if ``layout`` differs among members, OSError, RuntimeError or TimeoutError if one of them is
        not reached before ``deadline``.
        """
        self._destroy_retired()
        identity = tuple((member.worker, member.incarnation) for member in start.members)
        held = self._kept.pop(identity, None)
        try:
            room = room_of(start.key, start.members[0], self._member, self._server, self._peers, deadline)
            index = [member.worker for member in start.members].index(self._member.worker)
            offer = {"held": held.made_for if held else None, "layout": layout, "iteration": iteration}
            room.put(f"offer/{index}", json.dumps(offer).encode())
            offers = _read(room.get([f"offer/{offer_index}" for offer_index in range(len(start.members))]))
            self._check_same(start, [offer_index.get("layout") == layout for offer_index in offers])
            if held is None or any(offer_index.get("held") != held.made_for for offer_index in offers):
                self._retire(held)
                held = None
                held = Context(start.key, len(offers), self._connected(room, index, len(offers)))
        except BaseException:
            self._retire(held)
            raise
        return Rendezvous(held, [int(offer_index["iteration"]) for offer_index in offers])

    def _check_same(self, start: GroupStart, same: Sequence[bool]) -> None:
        if all(same):
            return
        members = [member.worker for member in start.members]
        mismatched = [worker for worker, as_here in zip(members, same, strict=True) if not as_here]
        like = [worker for worker in members if worker not in mismatched]
        raise LayoutError(
            "members of a group do not average the same tensors",
            got=f"{', '.join(map(str, mismatched))} differ from {', '.join(map(str, like))}",
            expected="the same model, trainable parameters and averaging options",
            fix="Run the same script on all workers, and freeze the same parameters.",
        )

    def keep(self, start: GroupStart, context: Context) -> None:
        """Cache ``context``, on which all members have averaged, for the next group of the same members."""
        identity = tuple((member.worker, member.incarnation) for member in start.members)
        self._kept[identity] = context
        while len(self._kept) > self._capacity:
            self._retire(self._kept.popitem(last=False)[1])

    def give_up(self, context: Context) -> None:
        """Discard ``context``: one of its members may have failed."""
        self._retire(context)

    def ended(self, start: GroupStart) -> None:
        """Close the room of a group that has averaged or given up."""
        if start.members[0].worker == self._member.worker:
            self._server.board.close(start.key)

    def close(self) -> None:
        """Close all connections."""
        for context in self._kept.values():
            self._retire(context)
        self._kept.clear()
        torch_private.let_gloo_finish()
        deadline = time.monotonic() + self._timeout.total_seconds() + SETTLING_S
        while self._retired and time.monotonic() < deadline:
            self._destroy_retired()
            if self._retired:
                time.sleep(0.05)

    def _connected(self, room: Room, index: int, size: int) -> Any:
        if self._device is None:
            self._device = torch_private.gloo_device(endpoint(self._member.address)[0])
        return torch_private.gloo_context(RoomStore(room), index, size, self._device, self._timeout)

    def _retire(self, context: Context | None) -> None:
        if context is not None:
            self._retired.append((time.monotonic(), context))

    def _destroy_retired(self) -> None:
        now = time.monotonic()
        for _ in range(len(self._retired)):
            retired_s, context = self._retired.popleft()
            if now < retired_s + SETTLING_S or not context.is_idle:
                self._retired.append((retired_s, context))


def _read(offers: Sequence[bytes]) -> list[Mapping[str, Any]]:
    try:
        documents = [json.loads(offer) for offer in offers]
    except (ValueError, RecursionError) as error:
        raise FrameError("an offer is not valid JSON") from error
    if not all(
        isinstance(document, dict) and isinstance(document.get("iteration"), int) for document in documents
    ):
        raise FrameError("an offer lacks its iteration")
    return documents


GRANT_POLL_S = 1.0
OUTCOME_S = 1.0


class Ending(enum.Enum):
    """How a round ended: with the group's mean, without it, still undecided, or without a group."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNCERTAIN = "uncertain"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Round:
    """Outcome of a round. Times are nanoseconds.

    ``asked_ns`` is when this worker asked, by ``time.monotonic_ns()``; ``waiting_ns`` is the time from then to the start
    of the group, ``reducing_ns`` until this worker held the mean, ``voting_ns`` until the decision, and ``blocked_ns``
    the time that training waited for the round. ``staleness`` counts this worker's steps between the averaged copy and
    applying the mean. ``distance`` is the Euclidean norm of the parameters minus the mean, ``relative_distance`` the
    same divided by the norm of the mean. ``iterations`` are those that the members had finished. ``reason`` says why no
    mean was applied.
    """

    iteration: int
    ending: Ending
    number: int = -1
    members: tuple[Worker, ...] = ()
    iterations: tuple[int, ...] = ()
    asked_ns: int = 0
    waiting_ns: int = 0
    reducing_ns: int = 0
    voting_ns: int = 0
    blocked_ns: int = 0
    staleness: int = 0
    size_bytes: int = 0
    distance: float = 0.0
    relative_distance: float = 0.0
    reason: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the metrics that are reported to the coordinator."""
        return {
            "iteration": float(self.iteration),
            "group_size": float(max(1, len(self.members))),
            "committed": float(self.ending is Ending.COMMITTED),
            "aborted": float(self.ending is Ending.ABORTED),
            "uncertain": float(self.ending is Ending.UNCERTAIN),
            "alone": float(self.ending is Ending.ALONE),
            "waiting_ms": self.waiting_ns / 1e6,
            "reducing_ms": self.reducing_ns / 1e6,
            "voting_ms": self.voting_ns / 1e6,
            "blocked_ms": self.blocked_ns / 1e6,
            "staleness": float(self.staleness),
            "iterations_apart": float(max(self.iterations, default=0) - min(self.iterations, default=0)),
            "averaged_bytes": float(self.size_bytes),
            "consensus_distance": self.distance,
            "relative_consensus_distance": self.relative_distance,
        }


@dataclass(slots=True)
class Copies:
    """Buffers of a round: the tensors when the worker asked (``before``), and their ``mean``."""

    layout: Layout
    before: Flat
    mean: Flat
    error: HeadwayError | None = field(default=None)


class Rounds:
    """Carries out the rounds of one worker. ``time_limit_s`` bounds the averaging of a group."""

    def __init__(
        self, worker: Worker, coordinator: Coordinator, contexts: Contexts, time_limit_s: float
    ) -> None:
        self._worker = worker
        self._coordinator = coordinator
        self._contexts = contexts
        self._time_limit_s = time_limit_s
        self._has_averaged = False
        self._stopped = False

    @property
    def worker(self) -> Worker:
        """The worker's number."""
        return self._worker

    def stop(self) -> None:
        """Stop waiting for groups: this worker leaves."""
        self._stopped = True

    def run(self, iteration: int, copies: Copies) -> tuple[Round, GroupStart | None]:
        """Ask, average and vote. If the round ends COMMITTED or UNCERTAIN, ``copies.mean`` holds the mean.

        If members do not average the same tensors, for example because one has unfrozen a part of the model and another
        is a step behind, the group discards the mean. A worker that has never averaged raises LayoutError then.
        """
        asked_ns = time.monotonic_ns()
        start = self._granted(iteration)
        granted_ns = time.monotonic_ns()
        alone = Round(iteration, Ending.ALONE, asked_ns=asked_ns, waiting_ns=granted_ns - asked_ns)
        if start is None:
            return replace(alone, reason="the coordinator is unreachable"), None
        members = tuple(member.worker for member in start.members)
        alone = replace(alone, number=start.number, members=members)
        if len(members) < 2:
            return replace(alone, reason="no other worker"), start
        return self._average(start, copies, alone, granted_ns), start

    def _granted(self, iteration: int) -> GroupStart | None:
        """Wait for this worker's group; returns None if the coordinator is unreachable.

        While it is reachable, the worker keeps waiting: if it continued alone, its group would wait for it in vain.
        """
        if not self._coordinator.is_reachable:
            return None
        self._coordinator.ask(iteration)
        while True:
            began = time.monotonic()
            start = self._coordinator.granted(GRANT_POLL_S)
            if start is not None:
                return start
            if (
                self._stopped
                or not self._coordinator.is_reachable
                or time.monotonic() - began < GRANT_POLL_S / 2
            ):
                return None

    def _average(self, start: GroupStart, copies: Copies, alone: Round, granted_ns: int) -> Round:
        deadline = granted_ns / 1e9 + self._time_limit_s
        context: Context | None = None
        reason, iterations = "", alone.iterations
        mismatch: LayoutError | None = None
        try:
            met = self._contexts.meet(start, alone.iteration, copies.layout.digest, deadline)
            context, iterations = met.context, tuple(met.iterations)
            copies.mean.copy_(copies.before)
            _mean(context, copies.mean, deadline)
        except LayoutError as error:
            mismatch, reason = error, str(error)
        except (RuntimeError, OSError) as error:  # a member failed: our tensors are unchanged
            reason = one_line(str(error), 200) or type(error).__name__
        reduced_ns = time.monotonic_ns()
        ending = self._decision(start.number, deadline, reduced=not reason)
        voted_ns = time.monotonic_ns()
        if context is not None and ending is Ending.COMMITTED:
            self._contexts.keep(start, context)
        elif context is not None:
            self._contexts.give_up(context)
        self._contexts.ended(start)
        self._has_averaged |= ending is Ending.COMMITTED
        if mismatch is not None and not self._has_averaged:
            raise mismatch
        return replace(
            alone, ending=ending, iterations=iterations, reducing_ns=reduced_ns - granted_ns,
            voting_ns=voted_ns - reduced_ns, size_bytes=copies.before.size_bytes,
            reason=reason or ("" if ending is Ending.COMMITTED else "the group discarded the mean"),
        )  # fmt: skip

    def _decision(self, number: int, deadline: float, *, reduced: bool) -> Ending:
        # Other members may need until the group's time limit to notice that one of them lacks the mean.
        limit_s = max(0.0, deadline - time.monotonic()) + self._time_limit_s
        if self._coordinator.vote(number, reduced, limit_s) and reduced:
            return Ending.COMMITTED
        if not reduced:
            return Ending.ABORTED
        outcome = self._coordinator.outcome(number, OUTCOME_S)
        if outcome is None:
            return Ending.UNCERTAIN
        return Ending.COMMITTED if outcome else Ending.ABORTED


def _mean(context: Context, flat: Flat, deadline: float) -> None:
    for tensor in flat.wholes:
        context.all_reduce(tensor, deadline)
        tensor.div_(context.size)


def mean_of(flats: Sequence[Flat], into: Flat) -> None:
    """Write the mean of ``flats`` to ``into``, exact where all are equal; integers are copied from the first."""
    into.copy_(flats[0])
    for flat in flats[1:]:
        for target, first, tensor in zip(into.wholes, flats[0].wholes, flat.wholes, strict=True):
            if target.is_floating_point():
                target.add_(tensor - first, alpha=1 / len(flats))
