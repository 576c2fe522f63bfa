"""The process in which rank 0's tuner thinks, so that training keeps its core and its interpreter.

It reads steps and writes decisions, a line of JSON each. Where it ends early, training goes on in the order in force.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from headway.strategies import helper_process
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.tuning.observed import Columns, ObservedStep, number_and_candidate
from headway.strategies.pipeline.tuning.tuner import Decision, Tuner

ARROW = ">"  # between the ranks of a way, in JSON's keys


class TunerProcess:
    """A tuner in a process of its own."""

    def __init__(self, tuner: Tuner) -> None:
        self._process = helper_process.begin(__name__)
        self._decisions: queue.SimpleQueue[Decision | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="headway-decisions", daemon=True).start()
        self.is_alive = True
        self._write(
            {
                "candidates": [each.model_dump(mode="json") for each in tuner.candidates],
                "boundary_bytes": tuner.boundary_bytes,
                "latency_us": tuner.latency_us,
            }
        )

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        """A step is over: the rows of its ranks."""
        self._write({"rows": rows})

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
        self._process.kill()
        self._process.wait()

    def _write(self, document: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.is_alive = False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._decisions.put(decision_from(json.loads(line)))
        self._decisions.put(None)


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
