"""Reversible monkey-patches used while recording, and the handling of failures in observers.

An exception in an observer never reaches the job: the job gets the result that it would have had without the observer,
and the listeners of ``on_fault`` are called, which stop the recording.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.errors import one_line


@dataclass(slots=True)
class Now:
    """Where the job is now: the current step, whether it is recorded, and the phase of the main thread.

    ``phase`` is "" (between passes), "enter" (in a forward, before its first module), "forward" or "backward".
    """

    step: int = 0
    recording: bool = False
    phase: str = ""


OnFailure = Callable[[Exception], object]

_listeners: list[OnFailure] = []


def on_fault(listener: OnFailure) -> Callable[[], None]:
    """Call ``listener`` with every exception of an observer, until the returned function is called."""
    _listeners.append(listener)

    def leave() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return leave


def report_fault(failure: Exception) -> None:
    """Pass an observer's exception to the listeners; without listeners, print it."""
    if not _listeners:
        print(f"headway: {describe_failure(failure)}; the job goes on", file=sys.stderr, flush=True)
    for listener in _listeners[:]:
        listener(failure)


def describe_failure(failure: Exception) -> str:
    """An observer's exception as one line of text."""
    return one_line(f"an observer failed ({type(failure).__name__}: {failure})", 300)


def guarded(observe: Callable[..., Any], on_failure: OnFailure = report_fault) -> Callable[..., Any]:
    """Wrap ``observe`` so that it never raises: ``on_failure`` is called instead, and None returned."""

    @functools.wraps(observe)
    def guard(*args: Any, **kwargs: Any) -> Any:
        try:
            return observe(*args, **kwargs)
        except Exception as failure:
            on_failure(failure)

    return guard


class _Original:
    """The job's function as an observer calls it. Keeps the call's result or error."""

    __slots__ = ("__name__", "error", "function", "result", "returned")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", "")
        self.result: Any = None
        self.returned = False
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self.function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


def observed_call(
    function: Callable[..., Any], observe: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``observe(function, *args)``, which calls ``function``. If the observer fails, do what ``function`` would."""
    original = _Original(function)
    try:
        return observe(original, *args, **kwargs)
    except BaseException as failure:
        if original.error is not None:
            if failure is not original.error:  # the observer failed while handling the job's error
                raise original.error from None
            raise
        if not isinstance(failure, Exception):
            raise
        report_fault(failure)
        return original.result if original.returned else function(*args, **kwargs)


def patch_method(owner: Any, name: str, observe: Callable[..., Any]) -> Callable[[], None]:
    """Make ``owner.name(*args)`` call ``observe(original, *args)``; returns a function that undoes this."""
    original = getattr(owner, name)
    kept = vars(owner)[name]  # not ``original``: put back, a bound C++ method would not bind again
    watching = True

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return observed_call(original, observe, *args, **kwargs) if watching else original(*args, **kwargs)

    def take_off() -> None:
        nonlocal watching
        watching = False  # if somebody patched it after us, it stays in place and passes calls on
        if getattr(owner, name) is observed:
            setattr(owner, name, kept)

    setattr(owner, name, observed)
    return take_off
