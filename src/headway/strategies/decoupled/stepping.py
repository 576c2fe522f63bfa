"""Deferring an optimizer's step: stock ``optimizer.step()`` is called by the script and meets a stand-in.

A public step pre-hook, common to all optimizers, hands ``step`` a stand-in for its optimizer. When the stock code
asks the stand-in for ``param_groups``, the parameters whose update the engine takes over are taken out, with the
hyper-parameters of this moment; the others are updated there and then. The deferred update runs the same stock code
later: on whole parameters once their gradients have arrived, or on this rank's shard. Hooks of users and schedulers see
one step, as ever. Optimizers that look at several elements or parameters at once step at once, on whole gradients.

Unscaling where gradients are sharded: each rank unscales its shards, rather than fetch every gradient.

What is not sharded is left to ``GradScaler``, which unscales in ``unscale_`` or in ``step``.

Clipping by norm where gradients are sharded: norms of shards are summed, rather than every gradient fetched.

What is sharded is clipped here, once something is wrapped, and everything else by torch, at the cost of reading every
gradient. So it is where a script has imported ``clip_grad_norm_`` before that could be replaced (see ``reads``).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from headway import torch_private
from headway.errors import UnsupportedError
from headway.strategies.decoupled import deferred
from headway.strategies.decoupled.condition import LOCK
from headway.strategies.decoupled.granularity import UpdateGranularity, granularity_of
from headway.strategies.decoupled.optimizers import StandIn, WatchedState
from headway.strategies.decoupled.parameter_state import ParameterState
from headway.strategies.decoupled.settlement import Form, ParameterGuard, Settlement
from headway.strategies.decoupled.sharded import ShardedGradients
from headway.strategies.live.reads import answer_clipping, answer_unscaling
from headway.torch_private.optimizers import before_every_step

_ZERO_GRAD = Optimizer.zero_grad
_KNOWN = {torch.Tensor, torch.nn.Parameter, deferred.DeferredParameter, deferred.DeferredGradient}

_bound: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


@cache
def watch_optimizers() -> None:
    """Notice every ``optimizer.step()`` of this process from now on."""
    before_every_step(_before_step)


def bind(optimizer: Optimizer) -> None:
    """Make ``optimizer`` ready for deferred steps."""
    if not isinstance(optimizer.state, WatchedState):
        for settlement in _settlements(optimizer):
            settlement.form.state_replaced(optimizer)
        optimizer.state = WatchedState(optimizer, bring_up_to_date)
    if optimizer not in _bound:
        _bound[optimizer] = optimizer.register_load_state_dict_pre_hook(
            lambda owner, _: bring_up_to_date(owner)
        )
        optimizer.zero_grad = _Clearing(optimizer)  # type: ignore[method-assign]


def unbind_unused() -> None:
    """Leave optimizers none of whose parameters belong to a decoupled model as they were before ``bind``."""
    for optimizer, handle in list(_bound.items()):
        state = optimizer.state
        if _guards(optimizer):
            continue
        if isinstance(state, WatchedState):
            if state.left or state.lost:
                continue
            optimizer.state = state.plain()
        handle.remove()
        put = optimizer.__dict__.get("zero_grad")
        if isinstance(put, _Clearing):  # else something has been put around it, and goes on calling it
            del optimizer.zero_grad
            if put.own is not None:
                optimizer.zero_grad = put.own  # type: ignore[method-assign]
        del _bound[optimizer]


def _guards(optimizer: Optimizer) -> list[ParameterGuard]:
    """Of those of the optimizer's parameters that belong to decoupled models."""
    found = (deferred.entry_of(p) for group in optimizer.param_groups for p in group["params"])
    return [guard for guard in found if guard is not None]


def bring_up_to_date(optimizer: Optimizer) -> None:
    """Apply every step of ``optimizer`` that is still due, and let it hold its whole state."""
    with LOCK:
        for guard in _guards(optimizer):
            guard.before_value()
        for settlement in _settlements(optimizer):
            settlement.condition.check_usable()
            settlement.form.state_wanted(optimizer)


def clear_gradients(parameters: Iterable[torch.Tensor], *, set_to_none: bool) -> None:
    """Clear gradients as ``zero_grad`` does, without waiting for those that are in flight.

    Afterwards stock code may go through them without subclass dispatch: ``.grad`` is what it should be.
    """
    with LOCK, torch_private.without_subclass_dispatch(), torch.no_grad():
        for parameter in parameters:
            guard: ParameterGuard | None = deferred.entry_of(parameter)
            if guard is None:
                continue
            state = guard.state
            if set_to_none:
                state.forget_look()
            if not state.phase.pending:
                continue
            guard.before_gradient_write()
            if set_to_none:
                deferred.clear_gradient(parameter)
            elif state.grad is not None:
                state.grad.zero_()
            elif guard.settlement.usage.anywhere(state):  # so that stock DDP would have made a gradient
                state.grad = torch.zeros_like(parameter)


def _settlements(optimizer: Optimizer) -> list[Settlement]:
    return list(dict.fromkeys(guard.settlement for guard in _guards(optimizer)))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if not deferred.anything_registered():
        return None
    settlements = _settlements(optimizer)
    if not settlements:
        return None
    granularity = granularity_of(optimizer)
    with LOCK:
        bind(optimizer)
        if isinstance(optimizer.state, WatchedState):
            optimizer.state.recover()
        for settlement in settlements:
            settlement.condition.check_usable()
            settlement.note_step(g.state for g in _guards(optimizer) if g.settlement is settlement)
            if granularity is not UpdateGranularity.ELEMENTWISE or settlement.form.stepped_by_another(
                optimizer
            ):
                settlement.gather_gradients_from_now_on()
    if granularity is UpdateGranularity.GLOBAL:
        return None  # its own code reads gradients and parameters, which bring themselves up to date
    return (StandIn(optimizer, partial(_defer, optimizer)), *args[1:]), kwargs


def _defer(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Give the engines their parameters to update, and return groups of the others."""
    with LOCK:
        return _deferred(optimizer)


def _deferred(optimizer: Optimizer) -> list[dict[str, Any]]:
    granularity = granularity_of(optimizer)
    guards: list[list[ParameterGuard | None]] = [
        [deferred.entry_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups
    ]
    _prepare(optimizer, guards, granularity)
    hyper_parameters = [_snapshot(group) for group in optimizer.param_groups]
    now: list[dict[str, Any]] = [{**group, "params": []} for group in optimizer.param_groups]
    taken: dict[Form, list[list[ParameterState]]] = {}
    for index, (group, of_group) in enumerate(zip(optimizer.param_groups, guards, strict=True)):
        for parameter, guard in zip(group["params"], of_group, strict=True):
            if guard is None or not (form := guard.settlement.form).takes(guard.state, granularity):
                now[index]["params"].append(parameter)
                continue
            if form not in taken:
                taken[form] = [[] for _ in now]
            taken[form][index].append(guard.state)
    for form, states in taken.items():
        form.step(optimizer, hyper_parameters, states)
    if taken and isinstance(optimizer.state, WatchedState):
        optimizer.state.behind = True
    return now


def _prepare(
    optimizer: Optimizer, guards: Sequence[Sequence[ParameterGuard | None]], granularity: UpdateGranularity
) -> None:
    """Settle what cannot wait, now that a closure has run."""
    scaled_by_amp = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    states_by_settlement: defaultdict[Settlement, list[ParameterState]] = defaultdict(list)
    for guard in chain.from_iterable(guards):
        if guard is not None:
            states_by_settlement[guard.settlement].append(guard.state)
    for settlement, states in states_by_settlement.items():
        settlement.condition.check_usable()
        if any(state.is_local for state in states):
            settlement.gather_gradients_from_now_on()
        if settlement.needs_gradients:
            settlement.form.state_wanted(optimizer)  # of the updates that are not deferred
        settlement.form.before_step(states, granularity, scaled_by_amp=scaled_by_amp)


def _snapshot(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


class _Clearing:
    """A ``zero_grad`` that does not wait for gradients in flight, and then does ``own``, or what the class has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.own = optimizer.__dict__.get("zero_grad")  # of the script, or of a library
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear."""
        owner = self._optimizer()
        assert owner is not None
        with LOCK:  # another thread's update may have put averages there for a moment
            self._clear(owner, set_to_none)

    def _clear(self, owner: Optimizer, set_to_none: bool) -> None:
        parameters = [p for group in owner.param_groups for p in group["params"]]
        clear_gradients(parameters, set_to_none=set_to_none)
        if self.own is not None:
            self.own(set_to_none)
        elif type(owner).zero_grad is _ZERO_GRAD and {type(p) for p in parameters} <= _KNOWN:
            with torch_private.without_subclass_dispatch():
                _ZERO_GRAD(owner, set_to_none)
        else:  # which may look at values too
            type(owner).zero_grad(owner, set_to_none)


class MaterialiseHook:
    """A forward pre-hook for one module. Copies and pickles of the module get one that does nothing.

    It serves code that would not be noticed by ``DeferredParameter``, such as C++ extensions. Where gradients are not
    recorded it brings up to date everything, since there is nothing to overlap with and fused inference kernels look at
    several modules' parameters at once. So does a compiled module, whose code reads parameters without asking and is
    made for ordinary ones.
    """

    def __init__(self, settlement: Settlement | None, module: nn.Module | None) -> None:
        self._settlement = None if settlement is None else weakref.ref(settlement)
        self._module = None if module is None else weakref.ref(module)

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        """Bring ``module``'s own parameters up to date."""
        settlement = None if self._settlement is None else self._settlement()
        if settlement is None or self._module is None or self._module() is not module:
            return
        settlement.join_settling()
        compiled = torch_private.has_compiled_forward(module)
        if torch.is_grad_enabled() and not compiled and not torch_private.inside_transform():
            for parameter in torch_private.own_parameters(module).values():
                if (
                    type(parameter) is deferred.DeferredParameter
                    and (guard := deferred.entry_of(parameter)) is not None
                ):
                    guard.before_value()
        elif not settlement.idle:
            self._settle(settlement, module, compiled=compiled)

    @staticmethod
    def _settle(settlement: Settlement, module: nn.Module, *, compiled: bool) -> None:
        """Bring everything up to date."""
        if not compiled:
            settlement.settle_values()
            return
        if settlement.condition.filling and not settlement.condition.is_elsewhere:
            raise UnsupportedError(
                "a compiled module runs inside backward", got=type(module).__name__,
                expected="checkpoints inside of what is compiled", fix="Use stock DDP.",
            )  # fmt: skip
        settlement.settle_all()

    def __deepcopy__(self, _memo: Any) -> MaterialiseHook:
        """A hook for the copy: nothing is in flight there."""
        return MaterialiseHook(None, None)

    def __reduce__(self) -> Any:
        """As for a copy."""
        return MaterialiseHook, (None, None)


def watch_clipping() -> None:
    """Clip what is sharded here from now on."""
    answer_clipping(_clipped)


def _clipped(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor | None:
    with LOCK:
        sharded = sharded_gradients_of(parameters)
        if sharded is None:
            return None
        gradients, states = sharded
        return gradients.clip(states, max_norm, norm_type, error_if_nonfinite)


def sharded_gradients_of(
    parameters: Iterable[torch.Tensor],
) -> tuple[ShardedGradients, list[ParameterState]] | None:
    """The sharded gradients of the engine that all gradients of ``parameters`` are sharded in; else None.

    The answer is the same on every rank, although some may have looked at their gradients.
    """
    states: list[ParameterState] = []
    settlements: set[Settlement] = set()
    for parameter in parameters:
        guard: ParameterGuard | None = deferred.entry_of(parameter)
        if guard is None and not parameter.requires_grad and parameter.grad is None:
            continue  # frozen: the stock function passes over it, too
        if guard is None or not guard.state.sharded:
            return None
        states.append(guard.state)
        settlements.add(guard.settlement)
    if len(settlements) != 1 or len(set(states)) != len(states):
        return None
    (settlement,) = settlements
    # Of a parameter that no rank has used the shards are zeros, which change neither a norm nor themselves.
    gradients = settlement.form.sharded_gradients
    if gradients is None or settlement.layout.device.type != "cpu" or settlement.condition.filling:
        return None
    return gradients, states


def watch_unscaling() -> None:
    """Unscale what is sharded here from now on."""
    answer_unscaling(_unscaled)


def _unscaled(
    optimizer: Optimizer, inverse_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
) -> Any:
    """Whether any gradient is not finite, by device; None where the stock method has to do it."""
    with LOCK:
        sharded = sharded_gradients_of([p for group in optimizer.param_groups for p in group["params"]])
        if sharded is None or found_inf.device.type != "cpu":
            return None
        gradients, states = sharded
        if not allow_fp16 and any(state.parameter.dtype == torch.float16 for state in states):
            return None  # the stock method refuses them
        gradients.unscale(states, inverse_scale, found_inf)
        return {found_inf.device: found_inf}
