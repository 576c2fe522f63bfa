"""Deferring an optimizer's step: stock ``optimizer.step()`` is called by the script and meets a stand-in.

A public step pre-hook, common to all optimizers, hands ``step`` a stand-in for its optimizer. When the stock code
asks the stand-in for ``param_groups``, the parameters whose gradients are still on their way are taken out and their
update is noted, with the hyper-parameters of this moment; the others are updated there and then. The noted update runs
the same stock code on the parameters of one bucket once their gradients have arrived. Hooks of users and schedulers
see one step, as ever.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.data_parallel.decoupled import deferred
from headway.strategies.data_parallel.decoupled.bucket import LiveBucket, Slot

SUPPORTED = (SGD, Adam, AdamW)
"""Optimizers whose update of an element depends on that element alone, so that it may run bucket by bucket."""

_bound: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_handle: torch.utils.hooks.RemovableHandle | None = None


def watch_optimizers() -> None:
    """Notice every ``optimizer.step()`` of this process from now on."""
    global _handle  # noqa: PLW0603 - one hook a process
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_step)


def bind(optimizer: Optimizer) -> None:
    """Make ``optimizer`` ready for deferred steps. Raises UnsupportedError where it cannot be deferred rightly."""
    if type(optimizer) not in SUPPORTED:
        raise UnsupportedError(
            "an optimizer cannot step a decoupled model", got=type(optimizer).__qualname__,
            expected=f"exactly one of {', '.join(t.__name__ for t in SUPPORTED)}",
            fix="Use one of these, or stock DDP.",
        )  # fmt: skip
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            "a differentiable optimizer cannot step a decoupled model", fix="Use stock DDP."
        )
    if not isinstance(optimizer.state, WatchedState):
        optimizer.state = WatchedState(optimizer)
    if optimizer in _bound:
        return
    _bound.add(optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda owner, _state: settle(owner))
    _override_zero_grad(optimizer)


def slots_of(optimizer: Optimizer) -> list[Slot]:
    """The slots of those of the optimizer's parameters that belong to decoupled models."""
    found = (deferred.entry_of(p) for group in optimizer.param_groups for p in group["params"])
    return [slot for slot in found if slot is not None]


def settle(optimizer: Optimizer) -> None:
    """Apply every step of ``optimizer`` that is still due."""
    for slot in slots_of(optimizer):
        slot.before_value()


def clear_gradients(parameters: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
    """Clear gradients as ``zero_grad`` does, without waiting for those that are under way."""
    for parameter in parameters:
        slot = deferred.entry_of(parameter)
        if slot is None or not slot.pending:
            continue
        slot.before_gradient_write()
        if set_to_none:
            slot.grad = None
        elif slot.grad is not None:
            with torch.no_grad():
                slot.grad.zero_()


class WatchedState(defaultdict[Any, Any]):
    """``optimizer.state`` that is up to date whenever somebody looks into it."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict, optimizer.state)
        self._optimizer = weakref.ref(optimizer)
        self.behind = False  # whether a step was deferred since somebody last looked

    def raw(self, key: Any) -> Any:
        """The state of one parameter as it is now, for the update itself."""
        if not dict.__contains__(self, key):
            dict.__setitem__(self, key, {})
        return dict.__getitem__(self, key)

    def _settle(self) -> None:
        if self.behind and (optimizer := self._optimizer()) is not None:
            settle(optimizer)
            self.behind = False

    def __reduce__(self) -> Any:
        self._settle()
        return defaultdict, (dict,), None, None, iter(dict.items(self))


def _watched(name: str) -> Callable[..., Any]:
    stock = getattr(defaultdict, name)

    def method(self: WatchedState, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return stock(self, *args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__",
    "__copy__", "get", "items", "keys", "values", "pop", "popitem", "setdefault", "update", "clear", "copy",
):  # fmt: skip
    setattr(WatchedState, _name, _watched(_name))


class _RawState:
    def __init__(self, state: WatchedState) -> None:
        self._state = state

    def __getitem__(self, key: Any) -> Any:
        return self._state.raw(key)


class _StandIn:
    """An optimizer with other ``param_groups``: what stock step code is run on."""

    def __init__(self, optimizer: Optimizer, groups: Callable[[], list[dict[str, Any]]]) -> None:
        self.__dict__["_optimizer"] = optimizer
        self.__dict__["_ask"] = groups
        self.__dict__["_groups"] = None
        # The script may give the optimizer a new state while this update is due; it belongs to the old one.
        state = optimizer.state
        self.__dict__["state"] = _RawState(state) if isinstance(state, WatchedState) else state

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


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if not slots_of(optimizer):
        return None
    bind(optimizer)
    return (_StandIn(optimizer, partial(_defer, optimizer)), *args[1:]), kwargs


def _defer(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Note the update of all parameters whose gradients are under way, and return groups of the others."""
    slots = slots_of(optimizer)
    for engine in {slot.engine for slot in slots}:
        engine.check_usable()
    scaled_by_amp = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    for slot in slots:
        # A second step without a backward, a loss scale that is about to vanish, a value that could be read
        # without asking: these cannot wait.
        if slot.pending and (slot.stepped or scaled_by_amp):
            slot.engine.settle(slot.bucket)
        if slot.pending and slot.shares_storage():
            slot.engine.warn_of_aliases(slot.name)
            slot.engine.settle(slot.bucket)
    hyper_parameters = [_snapshot(group) for group in optimizer.param_groups]
    now: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    later: dict[LiveBucket, list[list[torch.Tensor]]] = {}
    touched: list[Slot] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            entry: Slot | None = deferred.entry_of(parameter)
            if entry is None or not entry.pending:
                now[index]["params"].append(parameter)
                continue
            later.setdefault(entry.bucket, [[] for _ in now])[index].append(parameter)
            touched.append(entry)
    for slot in touched:
        slot.stepped = True
        with torch_private.without_subclass_dispatch():
            torch.autograd.graph.increment_version(slot.parameter)
    for bucket, parameters in later.items():
        groups = [{**h, "params": p} for h, p in zip(hyper_parameters, parameters, strict=True) if p]
        stand_in = _StandIn(optimizer, partial(list, groups))
        bucket.updates.append(partial(torch_private.unhooked_step(type(optimizer)), stand_in))
    if touched and isinstance(optimizer.state, WatchedState):
        optimizer.state.behind = True
    return now


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _override_zero_grad(optimizer: Optimizer) -> None:
    stock = optimizer.zero_grad
    reference = weakref.ref(optimizer)
    inherited = "zero_grad" not in optimizer.__dict__

    def zero_grad(set_to_none: bool = True) -> None:
        owner = reference()
        assert owner is not None
        parameters = [p for group in owner.param_groups for p in group["params"]]
        clear_gradients(parameters, set_to_none=set_to_none)
        if inherited:
            type(owner).zero_grad(owner, set_to_none)
        else:
            stock(set_to_none)

    if inherited:
        del stock
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
