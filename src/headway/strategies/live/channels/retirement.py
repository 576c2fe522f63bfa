"""Retirement: what one rank has no more use for is kept until no rank has, and is then ended.

A rank may let go of a wrapped model while others still train, save or ask about theirs. Ranks say that they have left,
and look whether the others have: where a model is wrapped, and with an optimizer's steps, on the main thread. No
thread has to wait for it, and over any number of models nothing is left behind.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from headway.torch_private.step_hooks import after_every_step

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
_pause_s = FIRST_LOOK_S
_next_look_s = 0.0
_left_behind: list[Callable[[], None]] = []
_collector: int | None = None  # the thread that collects garbage at the moment


def when_collected(owner: object, let_go: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Call ``let_go`` when ``owner`` is gone, at a point of the script where it may wait and take locks.

    That is at once where the last reference to it goes on the main thread, and otherwise where a model is wrapped or
    an optimizer has stepped. Not in the garbage collector: it runs between any two instructions, also of code that
    holds a lock which ``let_go`` would wait for. Nothing is called once what is returned is detached.
    """
    _watch()
    finalizer = weakref.finalize(owner, _gone, let_go)
    finalizer.atexit = False
    return finalizer


def retire(retired: Retired) -> None:
    """Have ``retired`` ended on the main thread when every rank has left it."""
    global _next_look_s, _pause_s  # noqa: PLW0603 - one look a process
    _watch()
    retired.leave()
    _retired.append(retired)
    _pause_s = FIRST_LOOK_S
    _next_look_s = time.monotonic() + _pause_s


def let_go_of_collected() -> None:
    """Call what ``when_collected`` has not yet called. To be called where a thread may wait."""
    found, _left_behind[:] = _left_behind[:], []
    for let_go in found:
        let_go()


def end_unused() -> None:
    """End what no rank uses any more. To be called on the main thread."""
    let_go_of_collected()
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


@cache
def _watch() -> None:
    gc.callbacks.append(_note_collector)
    after_every_step(_look_now_and_then)


def _note_collector(phase: str, _info: dict[str, int]) -> None:
    global _collector  # noqa: PLW0603 - the collector is the process's
    _collector = threading.get_ident() if phase == "start" else None


def _gone(let_go: Callable[[], None]) -> None:
    if sys.is_finalizing():
        return
    thread = threading.current_thread()
    if thread is threading.main_thread() and thread.ident != _collector:
        let_go()
    else:
        _left_behind.append(let_go)


def _look_now_and_then(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    global _next_look_s, _pause_s  # noqa: PLW0603 - as above
    if threading.current_thread() is not threading.main_thread():
        return
    let_go_of_collected()
    if not _retired or time.monotonic() < _next_look_s:
        return
    end_unused()
    # A rank may keep its model for hours, and a look asks every rank that has not let go.
    _pause_s = min(2 * _pause_s, LONGEST_PAUSE_S)
    _next_look_s = time.monotonic() + _pause_s
