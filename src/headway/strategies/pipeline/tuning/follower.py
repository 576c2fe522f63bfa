"""Drives a pipeline's tuner live: ranks report every step to rank 0, which broadcasts the order of the next step.

Reports travel while training goes on. Rank 0 broadcasts before every step, so every rank switches in the same step; the
schedule never changes within a step. The tuner runs in a process of its own, so that training keeps its core and its
interpreter; it exchanges steps and decisions as lines of JSON.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from subprocess import Popen
from typing import IO, Any, Protocol

import torch
import torch.distributed as dist

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies import helper_process
from headway.strategies.decisions import Entry, Journal
from headway.strategies.pipeline import runtime as failures
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime, StepWatch
from headway.strategies.pipeline.tuning.observed import Columns, ObservedStep, number_and_candidate
from headway.strategies.pipeline.tuning.tuner import Decision, Tuner, candidates_of
from headway.torch_private.pipelining import PipelineSteps

UNSENT = 64  # steps that the tuner has not read, after which it is told of no others
ARROW = ">"  # between the ranks of a way, in JSON's keys


class TunerProcess:
    """Runs a tuner in its own process, which ends with this object. Steps that it is too slow for are dropped.

    If the process ends early, training continues in the current order.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._process = process = helper_process.begin(__name__)
        self._decisions: queue.SimpleQueue[Decision | None] = queue.SimpleQueue()
        self._unsent: queue.Queue[bytes] = queue.Queue(UNSENT)
        for pump, ours in ((_read, self._decisions), (_write, self._unsent)):
            threading.Thread(target=pump, args=(process, ours), name="headway-tuner", daemon=True).start()
        self._end = weakref.finalize(self, _end, process, self._unsent)
        self.is_alive = True
        self._tell(
            {
                "candidates": [candidate.model_dump(mode="json") for candidate in tuner.candidates],
                "boundary_bytes": tuner.boundary_bytes,
                "latency_us": tuner.latency_us,
            }
        )

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        """Report a finished step: one row per rank."""
        self._tell({"rows": rows})

    def decisions(self) -> list[Decision]:
        """The decisions since the last call."""
        decided = []
        while not self._decisions.empty():
            decision = self._decisions.get()
            if decision is None:
                self.is_alive = False
            else:
                decided.append(decision)
        return decided

    def close(self) -> None:
        """End the process."""
        self._end()

    def _tell(self, document: dict[str, Any]) -> None:
        with suppress(queue.Full):  # a tuner that is stopped must not stop training
            self._unsent.put_nowait(json.dumps(document).encode() + b"\n")


# These threads must not reference the TunerProcess: they end when it is collected.


def _read(process: Popen[bytes], decisions: queue.SimpleQueue[Decision | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            decisions.put(decision_from(json.loads(line)))
    decisions.put(None)


def _write(process: Popen[bytes], unsent: queue.Queue[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # it has ended, which its output says
        while line := unsent.get():
            process.stdin.write(line)
            process.stdin.flush()


def _end(process: Popen[bytes], unsent: queue.Queue[bytes]) -> None:
    process.kill()
    process.wait()
    with suppress(queue.Full):  # then the thread writes, which fails
        unsent.put_nowait(b"")


def decision_document(decision: Decision) -> dict[str, Any]:
    """``decision`` as a JSON document."""
    links = {f"{sender}{ARROW}{receiver}": gbps for (sender, receiver), gbps in decision.links_gbps.items()}
    return {**asdict(decision), "links_gbps": links}


def decision_from(document: dict[str, Any]) -> Decision:
    """Read a decision from a JSON document."""
    links = {}
    for way, gbps in document["links_gbps"].items():
        sender, receiver = way.split(ARROW)
        links[int(sender), int(receiver)] = gbps
    predicted_ms = tuple(document["predicted_ms"])
    return Decision(**{**document, "links_gbps": links, "predicted_ms": predicted_ms})


def serve(read: IO[bytes], write: IO[bytes]) -> None:
    """Read steps and write decisions until the input ends."""
    setup = json.loads(read.readline())
    candidates = tuple(PipelineStrategy.model_validate(options) for options in setup["candidates"])
    tuner = Tuner(candidates, tuple(setup["boundary_bytes"]), setup["latency_us"])
    stages = len(tuner.boundary_bytes) + 1
    ranks = [candidate.schedule_of(stages) for candidate in candidates]
    columns = [[Columns(schedule, rank) for rank in range(len(schedule.ranks))] for schedule in ranks]
    for line in read:
        rows = json.loads(line)["rows"]
        number, candidate = number_and_candidate(rows[0])
        steps = tuple(column.step(row) for column, row in zip(columns[candidate], rows, strict=True))
        tuner = tuner.after(ObservedStep(number, candidate, steps))
        assert tuner.latest is not None
        write.write(json.dumps(decision_document(tuner.latest)).encode() + b"\n")
        write.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)


ROUND_TRIPS = 8
CLOCK_STEPS = 50  # after which clocks are compared again: they drift

_log = logging.getLogger("headway")


class ThinkingTuner(Protocol):
    """A tuner in another process or thread. Once ``is_alive`` is False it decides nothing more."""

    is_alive: bool

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        """Report a finished step: one row per rank."""

    def decisions(self) -> list[Decision]:
        """The decisions since the last call."""

    def close(self) -> None:
        """End the tuner."""


class Follower:
    """Makes ``runtime`` follow a tuner's decisions, which rank 0 collects in ``decisions``.

    Collective over the ranks of the pipeline. Raises UnsupportedError if arrival times of messages are not observable.
    """

    def __init__(
        self,
        steps: PipelineSteps,
        runtime: PipelineRuntime,
        strategy: PipelineStrategy,
        start: Callable[[Tuner], ThinkingTuner] = TunerProcess,
    ) -> None:
        if steps.device.type != "cpu" or dist.get_backend(steps.group) != dist.Backend.GLOO:
            raise UnsupportedError(
                "cannot tune the pipeline's order to its network here",
                got=f"{dist.get_backend(steps.group)} on {steps.device.type}",
                expected="Gloo on CPUs, where arrival times of messages are known",
                fix="Remove group_sizes and other_orders from the plan.",
            )
        if len(steps.stages) > 1:
            raise UnsupportedError(
                "cannot tune the order of a pipeline with several stages per rank",
                got=f"{len(steps.stages)} stages on rank {steps.rank}",
                fix="Remove group_sizes and other_orders from the plan.",
            )
        self.decisions: list[Decision] = []
        self._journal: Journal | None = None
        self._steps, self._runtime = steps, runtime
        self._candidates = candidates_of(strategy)
        self._schedules = [candidate.schedule_of(steps.stage_count) for candidate in self._candidates]
        self._columns = [Columns(schedule, steps.rank) for schedule in self._schedules]
        ranks = dist.get_process_group_ranks(steps.group)
        self._ranks = len(ranks)
        self._group = dist.new_group(
            ranks, torch_private.group_timeout(steps.group), backend="gloo", use_local_synchronization=True
        )
        self._length = max(
            Columns(schedule, rank).length for schedule in self._schedules for rank in range(self._ranks)
        )
        self._watch = StepWatch()
        self._start = start
        self._tuner: ThinkingTuner | None = None
        self._number = self._current = 0
        self._wanted = 0  # rank 0's word
        self._told: tuple[dist.Work, list[torch.Tensor]] | None = None
        runtime.observe(self._watch, self._before_step, self._after_step)

    @property
    def has_tuner(self) -> bool:
        """Whether this rank runs the tuner: rank 0, from the second step on."""
        return self._tuner is not None

    def close(self) -> None:
        """End the tuner; training continues in the current order."""
        if self._tuner is not None:
            self._tuner.close()
            self._tuner = None

    def _before_step(self) -> None:
        with failures.named(self._steps.group, 0, "receiving the next order from rank 0"):
            self._tell_and_hear()

    def _tell_and_hear(self) -> None:
        if self._told is not None:
            self._take_in(*self._told)
            self._told = None
        word = torch.tensor([self._wanted])
        dist.broadcast(word, group=self._group, group_src=0)
        chosen = int(word)
        if chosen != self._current:
            self._current = chosen
            self._runtime.follow(self._schedules[chosen])
        if self._number % CLOCK_STEPS == 0:
            self._watch.offset_ns = _offset_ns(self._group, self._steps.rank, self._ranks)

    def _after_step(self) -> None:
        step = self._watch.ended()
        row = self._columns[self._current].row(self._number, self._current, step)
        padded_row = torch.tensor(row + [0] * (self._length - len(row)))
        first = self._steps.rank == 0
        rows = [torch.empty_like(padded_row) for _ in range(self._ranks)] if first else []
        if self._number == 0:
            self._set_up()
        work = dist.gather(padded_row, rows or None, group=self._group, group_dst=0, async_op=True)
        assert work is not None
        self._told = work, rows
        self._number += 1

    def _set_up(self) -> None:
        """Start the tuner after the first step, when message sizes are known."""
        received_bytes = torch.tensor([self._runtime.received_bytes()])
        sizes = [torch.empty_like(received_bytes) for _ in range(self._ranks)]
        dist.all_gather(sizes, received_bytes, group=self._group)
        if self._steps.rank == 0:
            boundary_bytes = tuple(int(siz) for siz in sizes[1:])
            self._tuner = self._start(Tuner(self._candidates, boundary_bytes))
            self._journal = Journal.wanted()

    def _take_in(self, work: dist.Work, rows: Sequence[torch.Tensor]) -> None:
        work.wait()
        if self._tuner is None:
            return
        for decision in self._tuner.decisions():
            self._decided(decision)
        if self._tuner.is_alive:
            self._tuner.tell([row.tolist() for row in rows])
        else:
            _log.warning("the tuner's process ended; training continues in the current order")
            self._tuner = None

    def _decided(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if self._journal is not None:
            self._journal.add(entry_of(decision, [candidate.describe() for candidate in self._candidates]))
        if decision.before != self._wanted:
            return  # about a step before the last switch
        self._wanted = decision.candidate
        level = logging.INFO if decision.switches else logging.DEBUG
        name = self._candidates[decision.candidate].describe()
        _log.log(level, "step %d: %s: %s", decision.step, name, decision.reason)


def entry_of(decision: Decision, orders: Sequence[str]) -> Entry:
    """The journal entry of a decision; ``orders`` names the candidates."""
    return Entry(
        step=decision.step,
        before=orders[decision.before],
        order=orders[decision.candidate],
        reason=decision.reason,
        measured_ms=decision.measured_ms,
        predicted_ms=dict(zip(orders, decision.predicted_ms, strict=False)),
        links_gbps={f"{sender}>{receiver}": gbps for (sender, receiver), gbps in decision.links_gbps.items()},
    )


def _offset_ns(group: dist.ProcessGroup, rank: int, ranks: int) -> int:
    """The offset (ns) from this rank's clock to rank 0's, by the fastest round trip (Cristian's algorithm)."""
    moment = torch.zeros(1, dtype=torch.int64)
    best = (0, 0)  # of a round trip: how long it took, and the offset that it says
    for peer in range(1, ranks):
        for trip in range(ROUND_TRIPS):
            if rank == peer:
                begin_ns = time.monotonic_ns()
                dist.send(moment, group=group, group_dst=0)
                dist.recv(moment, group=group, group_src=0)
                end_ns = time.monotonic_ns()
                measured = end_ns - begin_ns, int(moment) - (begin_ns + end_ns) // 2
                best = min(best, measured) if trip else measured
            elif rank == 0:
                dist.recv(moment, group=group, group_src=peer)
                moment[0] = time.monotonic_ns()
                dist.send(moment, group=group, group_dst=peer)
    return best[1]
