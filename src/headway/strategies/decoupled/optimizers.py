"""What scripts meet in the place of an optimizer and of its state, right whenever they are looked at."""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
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


_OF_THE_MOMENT = ("grad_scale", "found_inf")  # what a gradient scaler hands a step and takes away behind it


class StandIn:
    """An optimizer with other ``param_groups``. Its ``state`` is the optimizer's own, unwatched, unless given."""

    def __init__(
        self, optimizer: Optimizer, groups: Callable[[], list[dict[str, Any]]], state: Any = None
    ) -> None:
        self.__dict__["_optimizer"] = optimizer
        self.__dict__["_ask"] = groups
        self.__dict__["_groups"] = None
        # The script may give the optimizer a new state while this update is due; it belongs to the old one.
        own = optimizer.state
        if state is None:
            state = RawState(own) if isinstance(own, WatchedState) else own
        self.__dict__["state"] = state
        for name in _OF_THE_MOMENT:
            if getattr(optimizer, name, None) is not None:
                self.__dict__[name] = getattr(optimizer, name)

    @property
    def lent(self) -> list[torch.Tensor]:
        """The tensors it has kept, which belong to who called the step."""
        return [
            self.__dict__[name]
            for name in _OF_THE_MOMENT
            if isinstance(self.__dict__.get(name), torch.Tensor)
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups to update now; asking for them the first time is what defers the others."""
        if self.__dict__["_groups"] is None:
            self.__dict__["_groups"] = self.__dict__["_ask"]()
        return self.__dict__["_groups"]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        optimizer = self.__dict__["_optimizer"]
        function = getattr(type(optimizer), name, None)
        if isinstance(function, types.FunctionType) and "health_check" not in name:
            return types.MethodType(function, self)
        return getattr(optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


class RawState:
    """A watched state, seen by the update itself."""

    def __init__(self, state: WatchedState) -> None:
        self._state = state

    def __getitem__(self, key: Any) -> Any:
        return self._state.raw(key)
