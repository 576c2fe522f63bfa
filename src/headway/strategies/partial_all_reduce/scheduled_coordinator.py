"""ScheduledCoordinator: groups by a fixed schedule, without anybody who coordinates.

Every rank knows who averages with whom after each iteration. The members of a group agree by themselves whether they
take the mean: their votes are counted by the first of them.
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
    """A ``Coordinator`` that answers from ``schedule`` and the iteration, for the ranks that meet in ``store``.

    ``run`` is the same on all ranks, and no other run's. Membership is fixed: where a rank is lost, each of its groups
    costs its members the time limit of a group, and they go on with their own parameters.
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
        """Always: there is nobody to reach."""
        return True

    @property
    def incarnation(self) -> int:
        """None is counted: ranks do not come back."""
        return 0

    def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        """Meet all ranks of the schedule; returns those of lower numbers. Raises CommunicationError."""
        keys = [f"{self._run}/member/{rank}" for rank in range(self._schedule.world_size)]
        try:
            self._store.set(keys[self._rank], json.dumps(as_json(member)))
            self._store.wait(keys, timedelta(seconds=timeout_s))
            members = [member_from(json.loads(self._store.get(key))) for key in keys]
        except (RuntimeError, OSError, ValueError) as error:
            raise CommunicationError(
                f"rank {self._rank}: not all {len(keys)} ranks of the schedule came within {timeout_s:g} s"
            ) from error
        self._members = {peer.worker: peer for peer in members}
        return members[: self._rank]

    def begin_together(self, timeout_s: float) -> None:
        """Return when every rank has called this: none may make a step before all hold the first one's parameters.

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
        """Rounds that there have been may come again, as every rank goes on from a checkpoint: they are others."""
        self._beginnings += 1
        self._starts.clear()
        self._outcomes.clear()

    def ask(self, iteration: int) -> None:
        """This rank has finished ``iteration``, counted from 1: its group is that of round ``iteration`` - 1."""
        self._iteration = iteration

    def granted(self, timeout_s: float) -> GroupStart | None:
        """The group of this round, at once."""
        del timeout_s
        ranks = self._schedule.group_of(self._rank, self._iteration - 1) or (self._rank,)
        number = self._iteration * self._schedule.world_size + ranks[0]
        members = tuple(self._members[rank] for rank in ranks)
        start = GroupStart(number, f"{self._run}/{self._beginnings}/{number}", members)
        self._starts = {number: start}
        return start

    def vote(self, number: int, reduced: bool, timeout_s: float) -> bool:
        """Whether all members of the group hold its mean: the first of them counts, and says so on its board."""
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
        """What the first member of the group has decided; None where it cannot be asked."""
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
        """Nobody watches."""

    def leave(self) -> None:
        """Nothing: membership is fixed."""


def number_of(coordinator: Coordinator | GroupSchedule, worker: Worker | None) -> Worker:
    """This worker's number: as it is told, or its rank in the schedule. Raises UserError where there is none."""
    if worker is not None:
        return worker
    if not isinstance(coordinator, GroupSchedule):
        raise UserError("this worker has no number", fix="Pass worker=, a number of its own in the job.")
    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group", expected="torch.distributed to be initialised",
            fix="Call torch.distributed.init_process_group first, under torchrun.",
        )  # fmt: skip
    if dist.get_world_size() != coordinator.world_size:
        raise UserError(
            "the schedule is for another number of workers", got=dist.get_world_size(),
            expected=str(coordinator.world_size),
        )  # fmt: skip
    return dist.get_rank()


_runs = 0


def run_name() -> str:
    """The same on all ranks, for each wrapped model of this process in turn."""
    global _runs  # noqa: PLW0603 - counts in one process
    _runs += 1
    return f"headway/partial/{_runs}"


def shared_secret() -> bytes:
    """A secret of the ranks of the default process group, from rank 0 by their store."""
    store = torch_private.default_store()
    key = f"headway/partial/{_runs + 1}/secret"
    if dist.get_rank() == 0:
        store.set(key, new_secret().hex())
    return bytes.fromhex(store.get(key).decode())
