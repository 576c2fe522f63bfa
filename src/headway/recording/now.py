"""Where the job is, as everything that watches it sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Now:
    """The current step, whether it is recorded, and what the main thread is in.

    ``phase`` is "" (between passes), "enter" (a forward, before its first module), "forward" or "backward".
    """

    step: int = 0
    recording: bool = False
    phase: str = ""
