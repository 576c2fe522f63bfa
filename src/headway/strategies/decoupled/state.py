"""WatchedState: ``optimizer.state`` that is up to date, and whole, whenever somebody looks into it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from headway.errors import UnsupportedError
from headway.strategies.decoupled.condition import LOCK


class WatchedState(defaultdict[Any, Any]):
    """The state of one optimizer. ``bring_up_to_date`` is called before a look, where a step was deferred since."""

    def __init__(self, optimizer: Optimizer, bring_up_to_date: Callable[[Optimizer], None]) -> None:
        super().__init__(dict, optimizer.state)
        self._optimizer = weakref.ref(optimizer)
        self._bring_up_to_date = bring_up_to_date
        self.behind = False
        self.lost = False  # the other ranks' shares cannot be had any more
        self.left: list[Callable[[Optimizer], None]] = []  # bring together what collected models' ranks keep

    def recover(self) -> None:
        """Hold the whole state again where the wrapped model that it was spread with has been collected.

        Raises UnsupportedError where it cannot be had any more, CommunicationError where a rank that has a share of it
        does not answer.
        """
        with LOCK:
            self._refuse_lost()
            optimizer = self._optimizer()
            while self.left and optimizer is not None:
                self.left[0](optimizer)
                del self.left[0]

    def raw(self, key: Any) -> Any:
        """The state of one parameter as it is now, for the update itself."""
        if not dict.__contains__(self, key):
            dict.__setitem__(self, key, {})
        return dict.__getitem__(self, key)

    def take(self, key: Any) -> Any:
        """Remove and return the state of one parameter as it is now; None where there is none."""
        return dict.pop(self, key, None)

    def put(self, key: Any, value: Any) -> None:
        """Set the state of one parameter."""
        dict.__setitem__(self, key, value)

    def plain(self) -> defaultdict[Any, Any]:
        """The same as torch has it, of an optimizer that is watched no longer: it is up to date and whole."""
        return defaultdict(dict, dict.items(self))

    def _refuse_lost(self) -> None:
        if self.lost:
            raise UnsupportedError(
                "an optimizer's state is spread over ranks whose process group is gone",
                fix="Call optimizer.state_dict() on every rank before destroying the group, and load it afterwards.",
            )

    def _settle(self) -> None:
        self.recover()
        if self.behind and (optimizer := self._optimizer()) is not None:
            self._bring_up_to_date(optimizer)
            self.behind = False

    def __reduce__(self) -> Any:
        with LOCK:
            self._settle()
            return defaultdict, (dict,), None, None, iter(list(dict.items(self)))


_GOING_THROUGH = ("__iter__", "items", "keys", "values")


def _watched(name: str) -> Callable[..., Any]:
    stock = getattr(defaultdict, name)

    def method(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        with LOCK:
            self._settle()
            if name not in _GOING_THROUGH:
                return stock(self, *args, **kwargs)
            # The thread that trains may step, and take entries out, while another one goes through them.
            return stock(defaultdict(dict, dict.items(self)))

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__",
    "__copy__", "get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy",
):  # fmt: skip
    setattr(WatchedState, _name, _watched(_name))
