"""The file in which a tuner's decisions stand, a line of JSON each, with their reasons."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from headway import files
from headway.errors import UserError
from headway.strategies.pipeline.tuning.tuner import Decision

DECISIONS_VARIABLE = "HEADWAY_DECISIONS"
MAX_BYTES = 256 * 2**20
_Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_log = logging.getLogger("headway")


class Entry(BaseModel):
    """What was decided after ``step``: under which order steps go on, and which was in force before."""

    model_config = ConfigDict(frozen=True)

    step: int = Field(ge=0)
    before: str
    order: str
    reason: str
    measured_ms: _Milliseconds
    """What the step took."""
    predicted_ms: dict[str, _Milliseconds]
    """What a step of each order was expected to take."""
    links_gbps: dict[str, float]
    """What links carried, from rank to rank as ``0>1``."""

    @property
    def switches(self) -> bool:
        """Whether another order was taken."""
        return self.order != self.before


class Journal:
    """Writes decisions into ``path``; what stood there goes. Training goes on where that fails, with a warning."""

    def __init__(self, path: Path, orders: Sequence[str]) -> None:
        self._path, self._orders = path, orders
        self._write("", "w")

    @classmethod
    def wanted(cls, orders: Sequence[str]) -> Journal | None:
        """The one that ``headway run --decisions`` has asked for, whose candidates are ``orders``; None without it."""
        path = os.environ.get(DECISIONS_VARIABLE)
        return cls(Path(path), orders) if path else None

    def add(self, decision: Decision) -> None:
        """Write one decision."""
        entry = Entry(
            step=decision.step,
            before=self._orders[decision.before],
            order=self._orders[decision.candidate],
            reason=decision.reason,
            measured_ms=decision.measured_ms,
            predicted_ms=dict(zip(self._orders, decision.predicted_ms, strict=False)),
            links_gbps={f"{one}>{other}": gbps for (one, other), gbps in decision.links_gbps.items()},
        )
        self._write(entry.model_dump_json() + "\n", "a")

    def _write(self, text: str, mode: str) -> None:
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as failure:
            _log.warning("decisions cannot be written to %s: %s", self._path, failure.strerror)


def read_journal(path: Path) -> list[Entry]:
    """The decisions of a run, in order; a last line that is being written is passed over.

    Raises UserError where the file is missing, too large, or holds something else.
    """
    lines = files.read_text(path, UserError, "decisions", MAX_BYTES).split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(
                f"line {number} of {path} is no decision", got=line[:80],
                expected="a file that headway run --decisions wrote",
            ) from None  # fmt: skip
        found.append(files.validate(document, Entry, UserError, f"line {number} of {path}"))
    if not found:
        raise UserError(
            f"{path} holds no decision",
            expected="a run whose plan follows the network, of several steps",
            fix="Plan with headway optimize --follow-network.",
        )
    return found
