"""A stand-in for an optimizer: stock step code is run on it, with other parameter groups and another state."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from headway.strategies.decoupled.state import WatchedState

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
