"""ScheduledCoordinator: groups by a fixed schedule, without a coordinator process.

Every rank knows the group of each iteration. The first member of a group counts the votes on whether to apply the mean.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from headway import torch_private
from headway.errors import CommunicationError, UserError
from headway.rpc.trusted import new_secret
from headway.scheduling.groups import GroupSchedule
from headway.strategies.partial_all_reduce.coordinator.messages import Coordinator, GroupStart, Member
from headway.strategies.partial_all_reduce.finishing import as_json, member_from
from headway.strategies.partial_all_reduce.generators.generator import Worker
from headway.strategies.partial_all_reduce.peers import Peers, PeerServer, room_of

YES, NO = b"yes", b"no"


class ScheduledCoordinator:
    """A ``Coordinator`` that answers from ``schedule``, for ranks that share ``store``.

    ``run`` is a unique name, the same on all ranks. Membership is fixed: if a rank is lost, each of its groups costs the
    other members the time limit of a group, and they continue with their own parameters.
    """

    def __init__(
        self, schedule: GroupSchedule, rank: int, store: Any, run: str, server: PeerServer, peers: Peers
    ) -> None:
        if not 0 <= rank < schedule.world_size:
            raise ValueError(f"rank {rank} is not one of {schedule.world_size}")
        self._schedule, self._rank = schedule, rank
        self._store, self._run = store, run
        self._server, self._peers = server, peers
        self._members: dict[int, Member] = {}
        self._iteration = 0
        self._beginnings = 0
        self._starts: dict[int, GroupStart] = {}
        self._outcomes: dict[int, bool] = {}

    @property
    def is_reachable(self) -> bool:
        """Always True: there is no process to reach."""
        return True

    @property
    def incarnation(self) -> int:
        """Always 0: ranks do not rejoin."""
        return 0

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Wait for all ranks of the schedule; returns those of lower rank. Raises CommunicationError."""
        keys = [f"{self._run}/member/{rank}" for rank in range(self._schedule.world_size)]
        try:
            self._store.set(keys[self._rank], json.dumps(as_json(member)))
            self._store.wait(keys, timedelta(seconds=timeout_s))
            members = [member_from(json.loads(self._store.get(key))) for key in keys]
        except (RuntimeError, OSError, ValueError) as error:
            raise CommunicationError(
                f"rank {self._rank}: not all {len(keys)} ranks of the schedule joined within {timeout_s:g} s"
            ) from error
        self._members = {peer.worker: peer for peer in members}
        return members[: self._rank]

    def begin_together(self, timeout_s: float) -> None:
        """Wait until all ranks have called this, so that none steps before all hold rank 0's parameters.

        Raises CommunicationError.
        """
        keys = [f"{self._run}/ready/{rank}" for rank in range(self._schedule.world_size)]
        try:
            self._store.set(keys[self._rank], "")
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except (RuntimeError, OSError) as error:
            raise CommunicationError(
                f"rank {self._rank}: not all {len(keys)} ranks of the schedule were ready within {timeout_s:g} s"
            ) from error

    def begin_anew(self) -> None:
        """Give rounds new names after all ranks were restored from a checkpoint, since their numbers repeat."""
        self._beginnings += 1
        self._starts.clear()
        self._outcomes.clear()

    def ask(self, iteration: int) -> None:
        """Note that this rank has finished ``iteration``, counted from 1, so round ``iteration`` - 1 is next."""
        self._iteration = iteration

    def granted(self, timeout_s: float) -> GroupStart | None:
        """Return the group of this round immediately."""
        del timeout_s
        ranks = self._schedule.group_of(self._rank, self._iteration - 1) or (self._rank,)
        number = self._iteration * self._schedule.world_size + ranks[0]
        members = tuple(self._members[rank] for rank in ranks)
        start = GroupStart(number, f"{self._run}/{self._beginnings}/{number}", members)
        self._starts = {number: start}
        return start

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        """Vote; returns whether all members hold the mean, which the first member decides on its board."""
        start = self._starts[number]
        deadline = time.monotonic() + timeout_s
        index = [member.worker for member in start.members].index(self._rank)
        room = room_of(
            f"{start.key}/votes", start.members[0], start.members[index], self._server, self._peers, deadline
        )
        try:
            room.put(f"vote/{index}", YES if reduced else NO)
            if index == 0:
                decision = YES
                for voter in range(len(start.members)):
                    (vote,) = room.get([f"vote/{voter}"])
                    if vote != YES:
                        decision = NO
                        break
                room.put("decision", decision)
            (outcome,) = room.get(["decision"])
        except OSError:
            if index == 0:
                self._server.board.put(f"{start.key}/votes", "decision", NO)
                self._outcomes = {number: False}
            return False
        self._outcomes = {number: outcome == YES}
        return outcome == YES

    def outcome(self, number: int, timeout_s: float) -> bool | None:
        """Return the decision of the group's first member; None if it cannot be reached."""
        if number in self._outcomes:
            return self._outcomes[number]
        start = self._starts.get(number)
        if start is None:
            return None
        member_here = self._members[self._rank]
        deadline = time.monotonic() + timeout_s
        room = room_of(
            f"{start.key}/votes", start.members[0], member_here, self._server, self._peers, deadline
        )
        try:
            (decision,) = room.get(["decision"])
        except OSError:
            return None
        return bool(decision == YES)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Do nothing: there is no coordinator to report to."""

    def leave(self) -> None:
        """Do nothing: membership is fixed."""


def number_of(coordinator: Coordinator | GroupSchedule, worker: Worker | None) -> Worker:
    """Return ``worker``, or this process's rank in the schedule. Raises UserError without either."""
    if worker is not None:
        return worker
    if not isinstance(coordinator, GroupSchedule):
        raise UserError("no worker number given", fix="Pass worker=, a number that is unique in the job.")
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "no process group", expected="torch.distributed to be initialised",
            fix="Run under torchrun and call torch.distributed.init_process_group first.",
        )  # fmt: skip
    if dist.get_world_size() != coordinator.world_size:
        raise UserError(
            "the schedule does not match the number of ranks", got=dist.get_world_size(),
            expected=str(coordinator.world_size),
        )  # fmt: skip
    return dist.get_rank()


_runs = 0


def run_name() -> str:
    """Return a name for the next wrapped model that is the same on all ranks."""
    global _runs  # noqa: PLW0603 - counts in one process
    _runs += 1
    return f"headway/partial/{_runs}"


def shared_secret() -> bytes:
    """Return a secret shared by the ranks of the default process group, through their store."""
    store = torch_private.default_store()
    key = f"headway/partial/{_runs + 1}/secret"
    if dist.get_rank() == 0:
        store.set(key, new_secret().hex())
    return bytes.fromhex(store.get(key).decode())
