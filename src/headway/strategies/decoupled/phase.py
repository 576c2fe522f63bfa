"""The life of a parameter between two backwards: its phases, what may happen in each, and what comes of it.

    CURRENT ──REDUCE──> REDUCING ──STEP──> STEPPED ──REPLACE──> CLEARED
       ^                   │  ^               │                    │
       │                 BRING└────SETTLE─────┤                    │
       │<──────────────────┘                BRING                SETTLE
       │<──SETTLE── GATHERING <───────────────┘                    │
       │<──────────────────────────────────────────────────────────┘

UNUSED and STEPPED_UNUSED are REDUCING and STEPPED where no rank used the parameter. RELEASE leads to CURRENT from
everywhere. What is not in ``TRANSITIONS`` cannot happen: trying it is an InternalError.
"""

from __future__ import annotations

import enum

from headway.errors import InternalError


class Phase(enum.Enum):
    """What is in flight for one parameter."""

    __hash__ = (
        object.__hash__
    )  # of Enum it is written in Python, and phases are looked up for every parameter

    CURRENT = (False, False, False, False)
    """Nothing."""
    REDUCING = (True, False, False, True)
    """Its gradient went into a reduction whose average is not in ``.grad``."""
    UNUSED = (True, False, False, False)
    """As before, but no rank used it, so that there is no average."""
    STEPPED = (True, True, False, True)
    """An optimizer stepped since, so that the value is one update behind as well."""
    STEPPED_UNUSED = (True, True, False, False)
    """As before, but there is no average."""
    CLEARED = (True, True, True, False)
    """Since that step the script replaced ``.grad``, which is no longer ours to write."""
    GATHERING = (False, True, False, False)
    """The value is one update behind; ``.grad`` is what it should be."""

    def __init__(self, pending: bool, stepped: bool, cleared: bool, to_bring: bool) -> None:
        self.pending = pending  # a reduction's result is not in ``.grad``
        self.stepped = stepped  # the value is one update behind
        self.cleared = cleared
        self.to_bring = (
            to_bring  # ``.grad`` lacks an average that a reduction left, or will leave, in the bucket
        )


class Event(enum.Enum):
    """What happens to a parameter."""

    REDUCE = "its gradient is handed to a reduction"
    STEP = "an optimizer steps it, and its update is deferred"
    BRING = "the average is written into .grad"
    FIND_UNUSED = "no rank turns out to have used it"
    REPLACE = "the script replaces .grad"
    SETTLE = "its value is brought up to date"
    RELEASE = "whatever was in flight ends"


class Outcomes(dict[Phase, Phase]):
    """The phase behind one event, by the phase before. Raises InternalError where the event is not legal."""

    def __init__(self, event: Event, phases: dict[Phase, Phase]) -> None:
        super().__init__(phases)
        self._event = event

    def __missing__(self, phase: Phase) -> Phase:
        raise InternalError(f"{self._event.value} in the phase {phase.name}, where that cannot happen")


TRANSITIONS: dict[Event, Outcomes] = {
    event: Outcomes(event, phases)
    for event, phases in {
        Event.REDUCE: {Phase.CURRENT: Phase.REDUCING},
        Event.STEP: {
            Phase.CURRENT: Phase.GATHERING,
            Phase.REDUCING: Phase.STEPPED,
            Phase.UNUSED: Phase.STEPPED_UNUSED,
        },
        Event.BRING: {Phase.REDUCING: Phase.CURRENT, Phase.STEPPED: Phase.GATHERING},
        Event.FIND_UNUSED: {Phase.REDUCING: Phase.UNUSED, Phase.STEPPED: Phase.STEPPED_UNUSED},
        Event.REPLACE: {
            Phase.CURRENT: Phase.CURRENT,
            Phase.GATHERING: Phase.GATHERING,
            Phase.REDUCING: Phase.CURRENT,
            Phase.UNUSED: Phase.CURRENT,
            Phase.STEPPED: Phase.CLEARED,
            Phase.STEPPED_UNUSED: Phase.CLEARED,
            Phase.CLEARED: Phase.CLEARED,
        },
        Event.SETTLE: {
            Phase.STEPPED: Phase.REDUCING,
            Phase.STEPPED_UNUSED: Phase.UNUSED,
            Phase.CLEARED: Phase.CURRENT,
            Phase.GATHERING: Phase.CURRENT,
        },
        Event.RELEASE: dict.fromkeys(Phase, Phase.CURRENT),
    }.items()
}
