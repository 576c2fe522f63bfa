"""Contexts: connections of Gloo among the members of one group, made when they average and kept for the next time.

Each group has a context of its own, since a time limit that strikes closes all connections of a context. The members
meet on the board of the first of them, where each says which context it still has of the same members and incarnations:
it is used again only if all have the same one, and else all make a new one.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from headway import torch_private
from headway.coordination.membership import GroupStart, Member
from headway.errors import UserError
from headway.rpc.trusted import remaining_s
from headway.strategies.partial_all_reduce.frames import FrameError
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer, Room, endpoint, room_of

CAPACITY = 16
SETTLING_S = 0.5  # Gloo's threads must have let go of tensors before a context is destroyed

Identity = tuple[tuple[int, int], ...]


class LayoutError(UserError):
    """Members of a group do not average the same tensors."""


@dataclass(eq=False, slots=True)
class Context:
    """Connections among the members of a group; ``made_for`` is the key of the group that they were made for."""

    made_for: str
    size: int
    gloo: Any
    works: list[Any] = field(default_factory=list)

    def all_reduce(self, flat: torch.Tensor, deadline: float) -> None:
        """Sum ``flat`` over the members, in place. Raises RuntimeError, TimeoutError; ``flat`` is then spoilt."""
        work = self.submit(flat)
        self.works.append(work)
        work.wait(timedelta(seconds=remaining_s(deadline)))
        self.works.remove(work)

    def submit(self, flat: torch.Tensor) -> Any:
        """Begin to sum ``flat``; what is returned is waited for."""
        return self.gloo.allreduce([flat])

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight on it."""
        return all(work.is_completed() for work in self.works)


@dataclass(frozen=True, slots=True)
class Met:
    """The members of a group have met: their ``context``, and the iteration that each has finished."""

    context: Context
    iterations: Sequence[int]


class RoomStore(Store):
    """A group's room as the store in which Gloo exchanges addresses."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self._room = room
        self._seen: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Leave an address."""
        self._room.put(f"gloo/{key}", value)

    def get(self, key: str) -> bytes:
        """A peer's address."""
        self.wait([key])
        return self._seen[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for peers' addresses, as long as the group's time limit allows."""
        del timeout
        if missing := [key for key in keys if key not in self._seen]:
            values = self._room.get([f"gloo/{key}" for key in missing])
            self._seen.update(zip(missing, values, strict=True))


class Contexts:
    """The contexts of one worker: at most ``capacity`` are kept, the least recently used go first.

    Their connections use this worker's own address. ``time_limit_s`` bounds every wait for one peer.
    """

    def __init__(
        self, own: Member, server: PeerServer, peers: Peers, time_limit_s: float, capacity: int = CAPACITY
    ) -> None:
        self._own, self._server, self._peers = own, server, peers
        self._timeout = timedelta(seconds=time_limit_s)
        self._capacity = capacity
        self._device: Any = None
        self._kept: OrderedDict[Identity, Context] = OrderedDict()
        self._retired: deque[tuple[float, Context]] = deque()

    @property
    def kept(self) -> int:
        """How many contexts are kept for the next time."""
        return len(self._kept)

    def meet(self, start: GroupStart, iteration: int, layout: str, deadline: float) -> Met:
        """Meet the other members of ``start`` and give the context to average on, which ``keep`` may take back.

        Raises LayoutError where ``layout`` is not the same on all, OSError, RuntimeError or TimeoutError where one of
        them is not reached before ``deadline``.
        """
        self._destroy_retired()
        identity = tuple((member.worker, member.incarnation) for member in start.members)
        held = self._kept.pop(identity, None)
        try:
            room = room_of(start.key, start.members[0], self._own, self._server, self._peers, deadline)
            index = [member.worker for member in start.members].index(self._own.worker)
            offer = {"held": held.made_for if held else None, "layout": layout, "iteration": iteration}
            room.put(f"offer/{index}", json.dumps(offer).encode())
            offers = _read(room.get([f"offer/{each}" for each in range(len(start.members))]))
            self._check_same(start, [each.get("layout") == layout for each in offers])
            if held is None or any(each.get("held") != held.made_for for each in offers):
                self._retire(held)
                held = None
                held = Context(start.key, len(offers), self._connected(room, index, len(offers)))
        except BaseException:
            self._retire(held)
            raise
        return Met(held, [int(each["iteration"]) for each in offers])

    def _check_same(self, start: GroupStart, same: Sequence[bool]) -> None:
        if all(same):
            return
        members = [member.worker for member in start.members]
        others = [worker for worker, as_here in zip(members, same, strict=True) if not as_here]
        like = [worker for worker in members if worker not in others]
        raise LayoutError(
            "members of a group do not average the same tensors",
            got=f"{', '.join(map(str, others))} other ones than {', '.join(map(str, like))}",
            expected="the same model, the same parameters that require gradients, and the same policies",
            fix="Start all workers with the same script, and have them freeze and unfreeze the same parameters.",
        )

    def keep(self, start: GroupStart, context: Context) -> None:
        """All members have averaged on ``context``: keep it for the next group of the same members."""
        identity = tuple((member.worker, member.incarnation) for member in start.members)
        self._kept[identity] = context
        while len(self._kept) > self._capacity:
            self._retire(self._kept.popitem(last=False)[1])

    def give_up(self, context: Context) -> None:
        """Never use ``context`` again: one of its members may have failed in the middle."""
        self._retire(context)

    def ended(self, start: GroupStart) -> None:
        """The group has averaged, or given up: forget what its members left on this worker's board."""
        if start.members[0].worker == self._own.worker:
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
            self._device = torch_private.gloo_device(endpoint(self._own.address)[0])
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
        found = [json.loads(offer) for offer in offers]
    except (ValueError, RecursionError) as error:
        raise FrameError("an offer is no JSON") from error
    if not all(isinstance(each, dict) and isinstance(each.get("iteration"), int) for each in found):
        raise FrameError("an offer lacks its iteration")
    return found
