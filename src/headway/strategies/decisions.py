"""The file of what is decided while a job trains: a line of JSON for each decision, with its reason."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from headway import files
from headway.errors import UserError, one_line
from headway.strategies.base import short_name

DECISIONS_VARIABLE = "HEADWAY_DECISIONS"
PRINT_VARIABLE = "HEADWAY_PRINT_DECISIONS"
MAX_BYTES = 256 * 2**20
MAX_LINE_BYTES = 2**20
MOST_DIGITS = 10
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_log = logging.getLogger("headway")


class Entry(BaseModel):
    """What was decided after ``step``: under which order or schedule steps go on, and which was in force before."""

    model_config = ConfigDict(frozen=True)

    step: _Count
    before: str
    order: str
    reason: str
    measured_ms: _Milliseconds
    """What the step took, or the steps since the last decision typically."""
    predicted_ms: dict[str, _Milliseconds] = Field(default_factory=dict)
    """What a step of each order was expected to take."""
    links_gbps: dict[str, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """What links carried, from rank to rank as ``0>1``."""
    attempt: _Count = 0
    """How often torchrun had started these ranks again because one had failed; steps count from each start on.

    It does not count starts for hosts that have joined, after which there are other numbers of workers.
    """
    workers: _Count = 0
    """How many ranks the job had then; 0 where that is not known."""

    @property
    def switches(self) -> bool:
        """Whether another order was taken."""
        return self.order != self.before

    @property
    def kind(self) -> tuple[str, str, str]:
        """What it has in common with decisions that differ in numbers alone."""
        return self.before, self.order, re.sub(r"[\d.]+", "#", self.reason)

    def sentence(self) -> str:
        """It in one line."""
        what = f"now {short_name(self.order)}, instead of" if self.switches else "goes on with"
        return one_line(f"after step {self.step}: {what} {short_name(self.before)}: {self.reason}")


class Journal:
    """Adds decisions to the file ``path``, each with the attempt and the number of workers of this process's job.

    Where that fails training goes on, with a warning. A journal that ``prints`` also says decisions on stderr: all that
    change something, and of those that do not one of each kind.
    """

    def __init__(self, path: Path | None, *, prints: bool = False) -> None:
        self._path = path
        self.prints = prints
        self._printed: set[tuple[str, str, str]] = set()
        self._job = {"attempt": _number("TORCHELASTIC_RESTART_COUNT"), "workers": _number("WORLD_SIZE")}
        if path is not None:
            _cut_unfinished(path)
            self._write("")  # says immediately where it cannot be written

    @classmethod
    def wanted(cls) -> Journal | None:
        """The one that ``headway run`` has asked for; None without it."""
        path, prints = os.environ.get(DECISIONS_VARIABLE), bool(os.environ.get(PRINT_VARIABLE))
        return _journal_at(Path(path) if path else None, prints) if path or prints else None

    def add(self, entry: Entry) -> None:
        """Write one decision."""
        self._write(entry.model_copy(update=self._job).model_dump_json() + "\n")
        if self.prints and (entry.switches or entry.kind not in self._printed):
            self._printed.add(entry.kind)
            print(f"headway: {entry.sentence()}", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as failure:
            _log.warning("decisions cannot be written to %s: %s", self._path, failure.strerror)


def _cut_unfinished(path: Path) -> None:
    """Take away the line that a process was writing when it was killed."""
    with suppress(OSError), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, end - MAX_LINE_BYTES))
        file.truncate(begin + file.read().rfind(b"\n") + 1)


def _number(variable: str) -> int:
    """What an environment variable of torchrun's says; 0 where it says no number."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() and len(value) < MOST_DIGITS else 0


@cache
def _journal_at(path: Path | None, prints: bool) -> Journal:
    """One for all models of this process."""
    return Journal(path, prints=prints)


def read_journal(path: Path) -> list[Entry]:
    """The decisions of a run, in order; a last line that is being written is passed over.

    Raises UserError where the file is missing, too large, or holds something else.
    """
    lines = files.read_text(path, UserError, "decisions", MAX_BYTES).split("\n")
    entries = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                f"line {number} of {path} is no decision", got=line[:80],
                expected="a file that headway run --decisions wrote",
            ) from None  # fmt: skip
        entries.append(files.validate(document, Entry, UserError, f"line {number} of {path}"))
    if not entries:
        raise UserError(
            f"{path} holds no decision",
            expected="a run of several steps whose plan changes while it trains",
            fix="Run with --adapt, or plan a pipeline with headway optimize --follow-network.",
        )
    return entries
