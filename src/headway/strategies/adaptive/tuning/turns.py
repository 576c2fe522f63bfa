"""Models of one process are tuned one after the other: each would disturb what is measured of the others."""

from __future__ import annotations

import weakref

ASKED_EVERY_STEPS = 10
MOST_IDLE_ASKS = 10
"""So many times in a row another model may have taken no step before its turn is passed over."""


class Turn:
    """One model's turn. It ends with ``give_back()``, with the model, or when the model takes no steps any more."""

    def __init__(self, model: object) -> None:
        self.steps = 0
        """How many steps the model has taken; whoever waits looks whether they become more."""
        self._model = weakref.ref(model)
        self._seen: weakref.WeakKeyDictionary[Turn, tuple[int, int]] = weakref.WeakKeyDictionary()

    def ask(self) -> bool:
        """Whether no other model that takes steps is having its turn. To be asked every ``ASKED_EVERY_STEPS``."""
        mine = self._model()
        others = [turn for turn in _taken if turn._model() not in (None, mine)]
        return not [turn for turn in others if not self._is_idle(turn)]

    @property
    def is_taken(self) -> bool:
        """Whether it is being had."""
        return self in _taken

    def take(self) -> None:
        """Have it, from now on; who is idle may have one at the same time."""
        _taken.add(self)

    def give_back(self) -> None:
        """Let others have theirs."""
        _taken.discard(self)

    def _is_idle(self, other: Turn) -> bool:
        steps, idle_asks = self._seen.get(other, (-1, 0))
        idle_asks = idle_asks + 1 if other.steps == steps else 0
        self._seen[other] = other.steps, idle_asks
        return idle_asks >= MOST_IDLE_ASKS


_taken: weakref.WeakSet[Turn] = weakref.WeakSet()
