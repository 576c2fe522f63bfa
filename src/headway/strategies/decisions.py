"""Journal of decisions made during training: one line of JSON per decision, with its reason."""

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
    """A decision after ``step``: the order or schedule from now on, and the one before."""

    model_config = ConfigDict(frozen=True)

    step: _Count
    before: str
    order: str
    reason: str
    measured_ms: _Milliseconds
    """Duration of the step, or typical duration of steps since the last decision."""
    predicted_ms: dict[str, _Milliseconds] = Field(default_factory=dict)
    """Expected step time of each order."""
    links_gbps: dict[str, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Measured link rates; keys name the ranks as ``0>1``."""
    attempt: _Count = 0
    """Restarts by torchrun after a failed rank; steps count from each restart.

    Restarts because hosts joined are not counted; they change ``workers``.
    """
    workers: _Count = 0
    """Number of ranks in the job; 0 if unknown."""

    @property
    def switches(self) -> bool:
        """Whether the order changed."""
        return self.order != self.before

    @property
    def kind(self) -> tuple[str, str, str]:
        """Key shared by decisions that differ only in numbers."""
        return self.before, self.order, re.sub(r"[\d.]+", "#", self.reason)

    def sentence(self) -> str:
        """Format the decision in one line."""
        what = f"now {short_name(self.order)}, instead of" if self.switches else "goes on with"
        return one_line(f"after step {self.step}: {what} {short_name(self.before)}: {self.reason}")


class Journal:
    """Appends decisions to the file ``path``, with the restart count and the number of workers of the job.

    If writing fails, training continues with a warning. With ``prints``, decisions also go to stderr: all that change
    something, and one of each other kind.
    """

    def __init__(self, path: Path | None, *, prints: bool = False) -> None:
        self._path = path
        self.prints = prints
        self._printed: set[tuple[str, str, str]] = set()
        self._job = {"attempt": _number("TORCHELASTIC_RESTART_COUNT"), "workers": _number("WORLD_SIZE")}
        if path is not None:
            _cut_unfinished(path)
            self._write("")  # warns immediately if the file is not writable

    @classmethod
    def wanted(cls) -> Journal | None:
        """Return the journal that ``headway run`` requested through the environment; None without one."""
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
            _log.warning("cannot write decisions to %s: %s", self._path, failure.strerror)


def _cut_unfinished(path: Path) -> None:
    """Remove a last line that a killed process left unfinished."""
    with suppress(OSError), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, end - MAX_LINE_BYTES))
        file.truncate(begin + file.read().rfind(b"\n") + 1)


def _number(variable: str) -> int:
    """Return an environment variable of torchrun as a number; 0 if it is not one."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() and len(value) < MOST_DIGITS else 0


@cache
def _journal_at(path: Path | None, prints: bool) -> Journal:
    """Return the journal shared by all models of this process."""
    return Journal(path, prints=prints)


def read_journal(path: Path) -> list[Entry]:
    """Read the decisions of a run in order, without an unfinished last line.

    Raises UserError if the file is missing, too large, or not a journal of decisions.
    """
    lines = files.read_text(path, UserError, "decisions", MAX_BYTES).split("\n")
    entries = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                f"line {number} of {path} is not a decision", got=line[:80],
                expected="a file written by headway run --decisions",
            ) from None  # fmt: skip
        entries.append(files.validate(document, Entry, UserError, f"line {number} of {path}"))
    if not entries:
        raise UserError(
            f"{path} contains no decisions",
            expected="a run of several steps under an adaptive plan",
            fix="Run with --adapt, or plan a pipeline with headway optimize --follow-network.",
        )
    return entries
