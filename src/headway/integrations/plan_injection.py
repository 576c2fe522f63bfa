"""Applies a plan to unmodified scripts: their ``DistributedDataParallel(model, ...)`` constructs the planned runtime.

The class itself is patched, not the name ``DistributedDataParallel``, so that it does not matter how and when a script
imported it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headway.errors import PlanError, UnsupportedError, UserError
from headway.integrations.fitted import check, strategy_for
from headway.integrations.followable import injection_of
from headway.passes.other_forward import applied_to, apply_all
from headway.plan import Plan
from headway.plugins import asking
from headway.strategies.injection import Injection
from headway.strategies.live.existing_group import existing_group
from headway.strategies.live.module_spec import model_spec
from headway.torch_private import backends_of, sharded_by_fully_shard
from headway.torch_private.optimizers import StepHook, before_every_step
from headway.units import format_bytes

_stock_init: Callable[..., None] = DistributedDataParallel.__init__
_stock_compile: Callable[..., Any] = torch.compile
_stock_signature = inspect.signature(_stock_init)


@dataclass(slots=True)
class _Installed:
    """The plan of this process. ``wrapper``, if the strategy has one, replaces DistributedDataParallel."""

    plan: Plan
    injection: Injection[Any]
    wrapper: type[DistributedDataParallel] | None
    wrapper_init: Callable[..., None] | None
    on_refusal: Callable[[UserError], object] | None
    step_hook: StepHook
    followed: bool = False  # whether a model was wrapped as the plan says
    in_place: set[int] = field(default_factory=set)  # ids of wrappers that replace a DistributedDataParallel


_installed: _Installed | None = None


def install(plan: Plan, on_refusal: Callable[[UserError], object] | None = None) -> None:
    """Make ``DistributedDataParallel(model, ...)`` of the plan's model follow ``plan`` in this process.

    The call raises PlanError for another number of workers, unless the plan adapts. Other models stay stock, and rank
    0 says so. PlanError is also raised by the first call of another model if no model has followed the plan by then,
    and by the first step of an optimizer whose model is sharded with ``fully_shard``. ``on_refusal`` is called with
    these two errors too, since the script may catch them.

    Raises UnsupportedError for a strategy that needs ``headway.parallelize``.
    """
    global _installed  # noqa: PLW0603 - the class that is changed is the process's too
    uninstall()
    injection = injection_of(plan)
    assert isinstance(injection, Injection)
    wrapper = injection.wrapper_under(plan.strategy)
    init = None if wrapper is None else wrapper.__init__
    for pass_ in plan.passes:
        with asking("pass", pass_):
            pass_.prepare()
    hook = before_every_step(_refuse_fully_sharded)
    _installed = _Installed(plan, injection, wrapper, init, on_refusal, hook)
    torch.compile = _compile
    DistributedDataParallel.__new__ = _planned_new  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = _planned_init  # type: ignore[method-assign]
    if wrapper is not None:
        _construct_in_place(wrapper)


def _tell(error: UserError) -> None:
    if _installed is not None and _installed.on_refusal is not None:
        _installed.on_refusal(error)


def followed() -> bool:
    """Whether a model was wrapped as the installed plan says."""
    return _installed is not None and _installed.followed


def uninstall() -> None:
    """Restore stock ``DistributedDataParallel``."""
    global _installed  # noqa: PLW0603 - as above
    if _installed is None:
        return
    _installed.step_hook.remove()
    if _installed.wrapper is not None:
        _installed.wrapper.__init__ = _installed.wrapper_init  # type: ignore[method-assign,assignment]
    _installed = None
    torch.compile = _stock_compile
    DistributedDataParallel.__init__ = _stock_init  # type: ignore[method-assign]
    # __new__ stays: without a plan it acts like object's, and CPython cannot cleanly undo its assignment.


@functools.wraps(_stock_compile)
def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    if _installed is not None and _installed.wrapper is not None and isinstance(model, _installed.wrapper):
        model.compile()  # raises the reason
    return _stock_compile(model, *args, **kwargs)


def _planned_new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if _installed is None or _installed.wrapper is None:
        return object.__new__(cls)
    model = kwargs.get("module", args[0] if args else None)
    if model is None:  # copied or unpickled
        return object.__new__(cls)
    if isinstance(model, nn.Module):
        planned = _is_planned(_installed.plan, model)
        _check_everywhere(planned, model, args, kwargs)
        if not planned:
            return object.__new__(cls)
    if cls is DistributedDataParallel:
        wrapped = object.__new__(_installed.wrapper)  # Python goes on with the wrapper's __init__
        _installed.in_place.add(id(wrapped))
        return wrapped
    if not issubclass(cls, _installed.wrapper):
        raise UnsupportedError(
            "a subclass of DistributedDataParallel cannot follow this plan", got=cls.__qualname__,
            fix="Use DistributedDataParallel itself, or run without the plan.",
        )  # fmt: skip
    return object.__new__(cls)


def _is_planned(plan: Plan, module: nn.Module) -> bool:
    return model_spec(module).fingerprint == plan.model.fingerprint


def _check_everywhere(
    planned: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise UserError if the model is the plan's on some ranks only, which would then hang. Collective."""
    parameter = next((p for p in module.parameters() if p.requires_grad), None)
    arguments = _stock_signature.bind_partial(None, *args, **kwargs).arguments
    if parameter is None or not dist.is_initialized() or arguments.get("device_mesh") is not None:
        return
    group = existing_group(arguments.get("process_group"))
    device = "cpu" if "cpu" in backends_of(group) else parameter.device
    model = int(model_spec(module).fingerprint[:15], 16)
    row = torch.tensor([int(planned), model], device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    rank = dist.get_rank(group)
    for other_rank, (is_planned_there, model_there) in enumerate(torch.stack(rows).tolist()):
        if bool(is_planned_there) == planned:
            continue
        with_plan, without = (rank, other_rank) if planned else (other_rank, rank)
        if model_there == model:
            raise UserError(
                "ranks do not agree on the plan",
                got=f"a plan for this model on rank {with_plan}, and for another model on rank {without}",
                expected="the same plan on every rank",
                fix="Give every host the same plan file.",
            )
        raise UserError(
            "ranks do not agree on the model's parameters (names, shapes, dtypes, and their order)",
            got=f"the plan's model on rank {with_plan}, and another model on rank {without}",
            expected="the same model on every rank",
            fix="Build the model the same way everywhere: register parameters in the same order.",
        )


def _stays_stock(plan: Plan, wrapped: DistributedDataParallel) -> None:
    """Check at the first call of ``wrapped``, when all models exist, that one of them follows ``plan``."""
    module = wrapped.module

    def first_call(_wrapped: nn.Module, _inputs: Any) -> None:
        handle.remove()
        if not followed():
            try:
                check(plan, module)
            except UserError as error:
                _tell(error)
                raise error.with_traceback(None) from None
        if dist.get_rank() == 0:
            which = f"{type(module).__name__} ({format_bytes(model_spec(module).size_bytes)})"
            kept = ", ".join(pass_.describe() for pass_ in applied_to(module) if pass_.changes_module)
            print(
                f"headway: the plan is for another model: {which} stays with stock DistributedDataParallel"
                + (f", but keeps changes that the plan has made to it: {kept}" if kept else ""),
                file=sys.stderr,
            )

    handle = wrapped.register_forward_pre_hook(first_call)


def _refuse_fully_sharded(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not followed() and sharded_by_fully_shard():
        error = PlanError(
            "the plan cannot be applied", got="a model sharded with fully_shard (FSDP2)",
            expected="a job that constructs DistributedDataParallel", fix="Run it without the plan.",
        )  # fmt: skip
        _tell(error)
        raise error


@functools.wraps(_stock_init)
def _planned_init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    installed = _installed
    if installed is None or (installed.wrapper is not None and isinstance(self, installed.wrapper)):
        # A wrapper that is a subclass of DistributedDataParallel constructs itself.
        _stock_init(self, module, *args, **kwargs)
        return
    planned = _is_planned(installed.plan, module)
    if installed.wrapper is None:  # otherwise __new__ has checked this
        _check_everywhere(planned, module, (module, *args), kwargs)
    if not planned:
        _stock_init(self, module, *args, **kwargs)
        if not type(module).__module__.startswith("headway."):  # such as the recorder's probes
            _stays_stock(installed.plan, self)
        return
    _construct(installed, _stock_init, self, module, *args, **kwargs)


def _construct_in_place(wrapper: type[DistributedDataParallel]) -> None:
    """Apply the plan to wrappers constructed in place of DistributedDataParallel, not to those constructed by name."""
    init: Callable[..., None] = wrapper.__init__

    @functools.wraps(init)
    def construct(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _installed is None or id(self) not in _installed.in_place:
            init(self, module, *args, **kwargs)
            return
        _installed.in_place.discard(id(self))
        _construct(_installed, init, self, module, *args, **kwargs)

    wrapper.__init__ = construct  # type: ignore[method-assign]


def _construct(
    installed: _Installed,
    init: Callable[..., None],
    wrapped: DistributedDataParallel,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    # The strategy may override positional arguments too.
    arguments = dict(_stock_signature.bind(wrapped, module, *args, **kwargs).arguments)
    del arguments["self"], arguments["module"]
    strategy = strategy_for(installed.plan, module, arguments.get("process_group"))
    installed.followed = True
    module = apply_all(installed.plan.passes, module, None)
    installed.injection.construct(init, wrapped, module, arguments, strategy)
