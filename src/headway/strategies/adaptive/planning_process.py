"""Rank 0's plan: a shortlist made here, or in a process of its own while training goes on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

from pydantic import BaseModel, ConfigDict

from headway.strategies import helper_process
from headway.strategies.adaptive.shortlist import shortlist
from headway.strategies.candidates import Candidate, Question


class Shortlist(BaseModel):
    """What rank 0 tells the others: what to try, or why nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidates: tuple[Candidate, ...] = ()
    problem: str = ""


def planned(question: Question) -> str:
    """The shortlist, as JSON."""
    try:
        short = Shortlist(candidates=tuple(shortlist(question)))
    except Exception as error:  # the other ranks wait for an answer, and training goes on without a plan
        short = Shortlist(problem=f"planning failed: {type(error).__name__}: {error}")
    return short.model_dump_json()


NICENESS = 10
MOST_S = 1800.0
FAILED = '{"problem": "planning failed: its process ended early"}'


class PlanningProcess:
    """A plan being made; ``answer`` is empty until it is."""

    def __init__(self, question: Question) -> None:
        self._answer: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = helper_process.begin(__name__)
            weakref.finalize(self, self._process.kill)
            self._reader = threading.Thread(
                target=_ask, args=(self._process, pickle.dumps(question), self._answer.append),
                name="headway-planning", daemon=True,
            )  # fmt: skip
            self._reader.start()
        except (OSError, RuntimeError):  # no process or thread can be had: the other ranks wait for an answer
            self._answer.append(FAILED)

    def answer(self) -> str:
        """The shortlist as JSON, or why there is none; empty as long as it is being planned."""
        return self._answer[0] if self._answer else ""

    def stop(self) -> None:
        """End it; nobody wants to know any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _ask(process: subprocess.Popen[bytes], question: bytes, tell: Callable[[str], None]) -> None:
    try:
        output, _ = process.communicate(question, timeout=MOST_S)
        tell(_shortlist_in(output) if process.returncode == 0 else FAILED)
    except (subprocess.TimeoutExpired, OSError, ValueError):
        process.kill()
        tell(FAILED)


def _shortlist_in(output: bytes) -> str:
    """The last line, behind what libraries may print as they are loaded. Raises ValueError where it is no shortlist."""
    text = output.decode().rstrip().rpartition("\n")[2]
    Shortlist.model_validate_json(text)
    return text


def serve(read: IO[bytes], write: IO[bytes]) -> None:
    """Plan what is read; training goes before on cores that are shared."""
    os.nice(NICENESS)
    write.write(planned(pickle.loads(read.read())).encode())
    write.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
