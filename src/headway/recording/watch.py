"""The interface of the recorder's watches. A new watch is a subclass, and a line in ``Recorder.__init__``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.trace.events import Event


class Watch:
    """Observes one aspect of a rank. The recorder calls each method at its moment; by default they do nothing.

    The recorder goes through its watches in order, and in reverse to detach. An exception in one of these methods ends
    the recording, never the job.
    """

    def attach(self) -> None:
        """Install hooks and patches; also called again after ``detach``."""

    def detach(self) -> None:
        """Remove all hooks and patches; what was observed is kept."""

    def step_begins(self, step: int) -> None:
        """Step ``step`` begins, recorded or not. Step 0 begins with the script, and is not announced."""

    def recording_begins(self, now_ns: int) -> None:
        """The first recorded step begins."""

    def update_begins(self) -> None:
        """An optimizer begins to update parameters."""

    def step_ends(self, step: int, now_ns: int, *, recorded: bool) -> None:
        """Step ``step`` ends."""

    def add_rows(self, rows: list[Event]) -> list[Event]:
        """Return ``rows``, the events of this rank so far, with those of this watch. Times are the local clock's."""
        return rows

    def notes(self, rows: Sequence[Event]) -> Iterable[str]:
        """Sentences for readers of the recording, given all its events."""
        return ()

    def forget(self) -> None:
        """Drop everything observed, and all references to the model."""
