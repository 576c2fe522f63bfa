"""Retirement: what one rank has no more use for is kept until no rank has, and is then ended.

A rank may let go of a wrapped model while others still train, save or ask about theirs. Ranks say that they have left,
and look whether the others have: where a model is wrapped, and with an optimizer's steps, on the main thread. No
thread has to wait for it, and over any number of models nothing is left behind.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook

FIRST_LOOK_S, LONGEST_PAUSE_S = 0.5, 60.0


class Retired(Protocol):
    """Something of this rank's that it has let go of, and others may not have."""

    def leave(self, *, exiting: bool = False) -> None:
        """Tell the other ranks that this one has left, if it has; where it is ``exiting`` it has."""

    def everyone_left(self, timeout_s: float = 0.0) -> bool:
        """Whether all ranks have said so, this one too; waits for the others up to ``timeout_s``."""

    def end(self) -> None:
        """Give it back: no rank uses it any more."""


_retired: list[Retired] = []
_looking: Any = None  # the hook on optimizers' steps, from when there is something to end
_pause_s = FIRST_LOOK_S
_next_look_s = 0.0


def retire(retired: Retired) -> None:
    """Have ``retired`` ended on the main thread when every rank has left it."""
    global _looking, _next_look_s, _pause_s  # noqa: PLW0603 - one hook a process
    retired.leave()
    _retired.append(retired)
    _pause_s = FIRST_LOOK_S
    _next_look_s = time.monotonic() + _pause_s
    if _looking is None:
        _looking = register_optimizer_step_post_hook(_look_now_and_then)


def end_unused() -> None:
    """End what no rank uses any more. To be called on the main thread."""
    global _looking  # noqa: PLW0603 - as above
    _end_unused()
    if not _retired and _looking is not None:
        _looking.remove()
        _looking = None


def _end_unused() -> None:
    for each in _retired[:]:
        each.leave()
        if each.everyone_left():
            _retired.remove(each)
            each.end()


def leave_all() -> None:
    """The process exits: it has no more use for anything."""
    for each in _retired:
        each.leave(exiting=True)


def wait_for_everyone(deadline_s: float) -> None:
    """Return when every rank has left what is retired here, or at ``deadline_s`` of the monotonic clock."""
    for each in _retired:
        each.everyone_left(max(0.0, deadline_s - time.monotonic()))


def _look_now_and_then(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    global _next_look_s, _pause_s  # noqa: PLW0603 - as above
    if not _retired or time.monotonic() < _next_look_s:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    _end_unused()  # the hook stays: an optimizer goes through all of them now, and none may be removed meanwhile
    # A rank may keep its model for hours, and a look asks every rank that has not let go.
    _pause_s = min(2 * _pause_s, LONGEST_PAUSE_S)
    _next_look_s = time.monotonic() + _pause_s
