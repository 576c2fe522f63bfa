"""The process in which rank 0's tuner thinks, so that training keeps its core and its interpreter.

It reads steps and writes decisions, a line of JSON each. Where it ends early, training goes on in the order in force.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from subprocess import Popen
from typing import IO, Any

from headway.strategies import helper_process
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.tuning.observed import Columns, ObservedStep, number_and_candidate
from headway.strategies.pipeline.tuning.tuner import Decision, Tuner

UNSENT = 64  # steps that the tuner has not read, after which it is told of no others
ARROW = ">"  # between the ranks of a way, in JSON's keys


class TunerProcess:
    """A tuner in a process of its own, which ends with this object. It is not told of steps that it is too slow for."""

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
                "candidates": [each.model_dump(mode="json") for each in tuner.candidates],
                "boundary_bytes": tuner.boundary_bytes,
                "latency_us": tuner.latency_us,
            }
        )

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        """A step is over: the rows of its ranks."""
        self._tell({"rows": rows})

    def decisions(self) -> list[Decision]:
        """What it has decided since it was asked last."""
        found = []
        while not self._decisions.empty():
            decision = self._decisions.get()
            if decision is None:
                self.is_alive = False
            else:
                found.append(decision)
        return found

    def close(self) -> None:
        """End it."""
        self._end()

    def _tell(self, document: dict[str, Any]) -> None:
        with suppress(queue.Full):  # a tuner that is stopped must not stop training
            self._unsent.put_nowait(json.dumps(document).encode() + b"\n")


# What threads hold must not hold the TunerProcess: its end is theirs.


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
    """``decision`` as JSON has it."""
    links = {f"{one}{ARROW}{other}": gbps for (one, other), gbps in decision.links_gbps.items()}
    return {**asdict(decision), "links_gbps": links}


def decision_from(document: dict[str, Any]) -> Decision:
    """The decision that a document is of."""
    links = {}
    for way, gbps in document["links_gbps"].items():
        one, other = way.split(ARROW)
        links[int(one), int(other)] = gbps
    predicted_ms = tuple(document["predicted_ms"])
    return Decision(**{**document, "links_gbps": links, "predicted_ms": predicted_ms})


def serve(read: IO[bytes], write: IO[bytes]) -> None:
    """Answer until there is nothing left to read. Of steps that came while it was thinking, all are taken in."""
    setup = json.loads(read.readline())
    candidates = tuple(PipelineStrategy.model_validate(each) for each in setup["candidates"])
    tuner = Tuner(candidates, tuple(setup["boundary_bytes"]), setup["latency_us"])
    stages = len(tuner.boundary_bytes) + 1
    ranks = [each.schedule_of(stages) for each in candidates]
    columns = [[Columns(schedule, rank) for rank in range(len(schedule.ranks))] for schedule in ranks]
    for line in read:
        rows = json.loads(line)["rows"]
        number, candidate = number_and_candidate(rows[0])
        steps = tuple(own.step(row) for own, row in zip(columns[candidate], rows, strict=True))
        tuner = tuner.after(ObservedStep(number, candidate, steps))
        assert tuner.latest is not None
        write.write(json.dumps(decision_document(tuner.latest)).encode() + b"\n")
        write.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
