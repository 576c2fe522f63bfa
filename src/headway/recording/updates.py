"""When an optimizer updates: its calls of ``step`` without the forwards and backwards that it has a closure do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from headway.recording.layer import guarded

PutUpdate = Callable[[str, int, int], None]

_CLOSURE = 1  # its position among the arguments of ``step``, behind the optimizer's


class UpdateWatch:
    """Tells ``put`` (name, start, end) of every stretch of updating in the main thread's calls of ``step``.

    ``begins`` is called as the first of a call begins. With a closure that is when it has returned: what comes before
    prepares. L-BFGS calls its closure several times and updates between the calls.
    """

    def __init__(self, put: PutUpdate, begins: Callable[[], None]) -> None:
        self._put = put
        self._begins = begins
        self._start_ns = 0  # of the stretch in progress; 0 where there is none

    def step_begins(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The optimizer ``name`` steps with these arguments; returns others that take their place, or None."""
        self._start_ns = 0
        if len(args) > _CLOSURE and callable(args[_CLOSURE]):
            closure = self._observed(name, args[_CLOSURE])
            return (*args[:_CLOSURE], closure, *args[_CLOSURE + 1 :]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._observed(name, kwargs["closure"])}
        self._begin()
        return None

    def step_ends(self, name: str, now_ns: int) -> None:
        """The call of ``step`` ends."""
        if self._start_ns:
            self._put(name, self._start_ns, now_ns)
            self._start_ns = 0

    def _begin(self) -> None:
        self._start_ns = time.monotonic_ns()
        self._begins()

    def _observed(self, name: str, closure: Callable[[], Any]) -> Callable[[], Any]:
        begins, ends = guarded(self._begin), guarded(self.step_ends)

        @functools.wraps(closure)
        def observed(*args: Any, **kwargs: Any) -> Any:
            ends(name, time.monotonic_ns())
            result = closure(*args, **kwargs)
            begins()
            return result

        return observed
