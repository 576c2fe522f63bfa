"""A round of one worker: it asks for a group, averages with its members in a copy, and takes the mean if all can.

P-Reduce of a group G: each member's tensors become the mean over G, and nothing else changes. As a matrix on the
workers' models that is 1/|G| inside G and the identity elsewhere, which is doubly stochastic: the mean over all workers
stays as it was. The coordinator decides, by the members' votes, whether all of them take the mean or none does.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway.coordination.generator import Worker
from headway.coordination.membership import Coordinator, GroupStart
from headway.errors import HeadwayError, one_line
from headway.strategies.live.averaged import Flat, Layout
from headway.strategies.partial_all_reduce.contexts import Context, Contexts, LayoutError

GRANT_POLL_S = 1.0
OUTCOME_S = 1.0


class Ending(enum.Enum):
    """How a round ended: with the group's mean, without it, not known yet, or without a group."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNCERTAIN = "uncertain"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in a round. Times are nanoseconds.

    ``asked_ns`` is when this worker asked, by ``time.monotonic_ns()``; ``waiting_ns`` is from asking to the group's
    beginning, ``reducing_ns`` until this worker held the mean, ``voting_ns`` until the decision, and ``blocked_ns`` how
    long training stood still for the round, whatever went on meanwhile. ``staleness`` counts this worker's steps
    between the copy that was averaged and the taking of the mean. ``distance`` is the Euclidean norm of the parameters
    minus their group's mean, ``relative_distance`` that divided by the norm of the mean. ``iterations`` are what the
    members had finished. ``reason`` says why there is no mean.
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
        """The numbers in it, as coordinators are told them."""
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
    """What a round works on: a worker's tensors as they were when it asked, and where their mean is computed."""

    layout: Layout
    own: Flat
    mean: Flat
    error: HeadwayError | None = field(default=None)


class Rounds:
    """Goes through the rounds of one worker. ``time_limit_s`` bounds the averaging of one group."""

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
        """Whose rounds they are."""
        return self._worker

    def stop(self) -> None:
        """Wait for no group any more: this worker leaves."""
        self._stopped = True

    def run(self, iteration: int, copies: Copies) -> tuple[Round, GroupStart | None]:
        """Ask, average and vote. Where it ends COMMITTED or UNCERTAIN, ``copies.mean`` holds the mean.

        Where members do not average the same tensors, as when one has unfrozen a part of the model and another is a
        step behind, the group takes no mean. A worker that has not averaged with anybody yet raises LayoutError then.
        """
        asked_ns = time.monotonic_ns()
        start = self._granted(iteration)
        granted_ns = time.monotonic_ns()
        alone = Round(iteration, Ending.ALONE, asked_ns=asked_ns, waiting_ns=granted_ns - asked_ns)
        if start is None:
            return replace(alone, reason="the coordinator is not reachable"), None
        members = tuple(member.worker for member in start.members)
        alone = replace(alone, number=start.number, members=members)
        if len(members) < 2:
            return replace(alone, reason="no other worker"), start
        return self._average(start, copies, alone, granted_ns), start

    def _granted(self, iteration: int) -> GroupStart | None:
        """The group that this worker is in; None where the coordinator cannot be reached.

        While it can be, the group is waited for: whoever went on alone would have its members wait for it in vain.
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
            copies.mean.copy_(copies.own)
            _mean(context, copies.mean, deadline)
        except LayoutError as error:
            mismatch, reason = error, str(error)
        except (RuntimeError, OSError) as error:  # a member was killed, stopped or cut off: ours is untouched
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
            voting_ns=voted_ns - reduced_ns, size_bytes=copies.own.size_bytes,
            reason=reason or ("" if ending is Ending.COMMITTED else "the group did not take the mean"),
        )  # fmt: skip

    def _decision(self, number: int, deadline: float, *, reduced: bool) -> Ending:
        # The others may take until the group's time limit to find out that one of them does not hold the mean.
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
    for whole in flat.wholes:
        context.all_reduce(whole, deadline)
        whole.div_(context.size)


def mean_of(flats: Sequence[Flat], into: Flat) -> None:
    """The mean of ``flats`` into another one, exactly where all are equal; what is no number, as the first has it."""
    into.copy_(flats[0])
    for flat in flats[1:]:
        for whole, first, other in zip(into.wholes, flats[0].wholes, flat.wholes, strict=True):
            if whole.is_floating_point():
                whole.add_(other - first, alpha=1 / len(flats))
