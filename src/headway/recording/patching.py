"""Reversible patches of other people's functions while a recording lasts, and where the job is."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.errors import one_line


@dataclass(slots=True)
class Now:
    """The current step, whether it is recorded, and what the main thread is in.

    ``phase`` is "" (between passes), "enter" (a forward, before its first module), "forward" or "backward".
    """

    step: int = 0
    recording: bool = False
    phase: str = ""


OnFailure = Callable[[Exception], object]

_listeners: list[OnFailure] = []


# The edge between a job and what observes it: functions laid over other people's, and what goes wrong in ours.
#
# Whatever an observer raises stops here. The job gets what it would have got without it, and ``on_fault`` is told, which
# stops the recording.


def on_fault(listener: OnFailure) -> Callable[[], None]:
    """Have ``listener`` called with what an observer raises, until what is returned is called."""
    _listeners.append(listener)

    def leave() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return leave


def report_fault(failure: Exception) -> None:
    """An observer has raised ``failure``."""
    if not _listeners:
        print(f"headway: {describe_failure(failure)}; the job goes on", file=sys.stderr, flush=True)
    for listener in _listeners[:]:
        listener(failure)


def describe_failure(failure: Exception) -> str:
    """What an observer raised, in one line."""
    return one_line(f"an observer failed ({type(failure).__name__}: {failure})", 300)


def guarded(observe: Callable[..., Any], on_failure: OnFailure = report_fault) -> Callable[..., Any]:
    """``observe``, which raises nothing: ``on_failure`` is called instead, and None returned."""

    @functools.wraps(observe)
    def guard(*args: Any, **kwargs: Any) -> Any:
        try:
            return observe(*args, **kwargs)
        except Exception as failure:
            on_failure(failure)

    return guard


class _Original:
    """The job's own function, as an observer calls it, and how that call went."""

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
    """Call ``observe(function, *args)``, which calls ``function``; where it fails, what ``function`` alone would do."""
    original = _Original(function)
    try:
        return observe(original, *args, **kwargs)
    except BaseException as failure:
        if original.error is not None:
            if failure is not original.error:  # raised by the observer as it heard of it
                raise original.error from None
            raise
        if not isinstance(failure, Exception):
            raise
        report_fault(failure)
        return original.result if original.returned else function(*args, **kwargs)


def patch_method(owner: Any, name: str, observe: Callable[..., Any]) -> Callable[[], None]:
    """Have ``owner.name(*args)`` call ``observe(original, *args)``; returns what takes it off again."""
    original = getattr(owner, name)
    kept = vars(owner)[
        name
    ]  # a method of C++ does not bind any more where what ``getattr`` gives is put back
    watching = True

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        return observed_call(original, observe, *args, **kwargs) if watching else original(*args, **kwargs)

    def take_off() -> None:
        nonlocal watching
        watching = False  # where others have laid theirs over it, it stays, and passes calls on
        if getattr(owner, name) is observed:
            setattr(owner, name, kept)

    setattr(owner, name, observed)
    return take_off
