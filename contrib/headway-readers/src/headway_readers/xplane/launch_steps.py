"""Which step each event of a device was asked for in: by its launch, by the run of its program, or else by its time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.arrays import Flags, Ints
from headway_readers.xplane.profile import Profile
from headway_readers.xplane.steps import Marks, Steps


class _Said(NamedTuple):
    """Numbers that events of devices share with the events of the host that asked for them, and the latter's steps."""

    key: str
    number: Ints
    step: Ints


class LaunchSteps:
    """Which of the marked steps asked for what. Without marks there is one step, and everything belongs to it."""

    def __init__(self, profile: Profile, marks: Marks | None) -> None:
        self._profile = profile
        self.steps: Steps | None = marks.steps if marks is not None else None
        devices = [place for place, line in enumerate(profile.lines) if line.plane.startswith("/device:")]
        self._said = [
            self._known("correlation_id", ~profile.on(devices), last_open=True),
            self._known("run_id", profile.value("num_partitions")[1], last_open=False),
        ]

    def _known(self, key: str, askers: Flags, *, last_open: bool) -> _Said:
        values, known = self._profile.value(key)
        asking = np.flatnonzero(askers & known)
        number, first = np.unique(values[asking], return_index=True)
        if self.steps is None:
            return _Said(key, number, np.zeros(len(number), dtype=np.int64))
        starts = self._profile.start_ns[asking[first]]
        return _Said(key, number, self.steps.of(starts, last_open=last_open))

    def of(self, events: Ints) -> Ints:
        """The step of each event, by its place; -1 for what belongs to none."""
        if self.steps is None:
            return np.zeros(len(events), dtype=np.int64)
        found = self.steps.of(self._profile.start_ns[events], last_open=True)
        for said in self._said:
            if len(said.number):
                values, known = (column[events] for column in self._profile.value(said.key))
                at = np.minimum(np.searchsorted(said.number, values), len(said.number) - 1)
                found = np.where(known & (said.number[at] == values), said.step[at], found)
        return found
