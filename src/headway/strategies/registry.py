"""Registry of strategies: those shipped with Headway, and those of other packages.

Other packages register ``StrategyPlugin`` objects as entry points of the group ``headway.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    BeforeValidator,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapSerializer,
)

from headway.errors import PluginError
from headway.plugins import answers, check_complete, load_entry_points, why_unusable
from headway.strategies.base import Strategy
from headway.strategies.plugin import StrategyPlugin

A = TypeVar("A")

GROUP = "headway.strategies"
SHIPPED = (
    "headway.strategies.ddp.plugin",
    "headway.strategies.decoupled.plugin",
    "headway.strategies.adaptive.plugin",
    "headway.strategies.parameter_server.plugin",
    "headway.strategies.pipeline.plugin",
    "headway.strategies.partial_all_reduce.plugin",
)

COMPOSED = {"mesh": "headway.strategies.pipeline.mesh_plugin"}
"""Strategies composed of one part per mesh dimension; plan files list the parts instead of a name."""


@cache
def plugins() -> dict[str, StrategyPlugin[Any]]:
    """All strategies by name, Headway's own first."""
    strategies: dict[str, StrategyPlugin[Any]] = {}
    for module in SHIPPED:
        plugin: StrategyPlugin[Any] = import_module(module).PLUGIN
        strategies[plugin.name] = plugin
    expected = "a StrategyPlugin whose policy has that name"
    strategies.update(
        (plugin.name, plugin) for plugin in load_entry_points(GROUP, strategies, _fitting, expected)
    )
    return strategies


def check_usable(name: str) -> None:
    """Raise PluginError if an installed package has a strategy of this name that cannot be used."""
    if name not in plugins() and (why := why_unusable(GROUP, name)):
        raise PluginError(why)


def ask(
    question: Callable[[StrategyPlugin[Any]], A], *, last_first: bool = False, needed: str = ""
) -> Iterator[tuple[str, A]]:
    """Yield each strategy's name and answer. Strategies of other packages that raise are skipped with a warning.

    Raises PluginFaultError if that strategy is ``needed``.
    """
    strategies = list(plugins().items())
    return answers("strategy", reversed(strategies) if last_first else strategies, question, needed=needed)


def _fitting(name: str, candidate: object) -> StrategyPlugin[Any] | None:
    if isinstance(candidate, StrategyPlugin) and candidate.name == name:
        check_complete(candidate.policy)
        return candidate
    return None


def names() -> tuple[str, ...]:
    """Names of all strategies."""
    return tuple(plugins())


def plugin_named(name: str) -> StrategyPlugin[Any]:
    """Return the plug-in called ``name``, one of ``names``."""
    return plugins()[name]


def policy_named(name: str) -> type[Strategy]:
    """Return the policy class of the strategy called ``name``, one of ``names`` or ``COMPOSED``."""
    return _plugin(name).policy


def as_recorded() -> Strategy:
    """What lays out all-reduces of which nothing but their sizes is known: a bucket of every "parameter"."""
    return policy_named("ddp").model_validate({"bucket_cap_mb": 0})


def stock() -> Strategy:
    """What a script has that wraps its model in DistributedDataParallel and sets nothing."""
    return policy_named("ddp").model_validate({})


def without_a_plan() -> Strategy:
    """What ``headway.parallelize`` does without a plan."""
    return policy_named("adaptive").model_validate({"tune": True})


def of_today(name: str, options: Any) -> tuple[str, Any]:
    """The strategy ``name`` of a plan file, and its options, as they are called in the present format."""
    for plugin in plugins().values():
        if (translated := plugin.of_earlier_format(name, options)) is not None:
            return translated
    return name, options


def _by_name(value: Any) -> Any:
    if isinstance(value, Strategy):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError("the name of one strategy, with its options below it")
    ((name, options),) = value.items()
    if name not in names():
        raise ValueError(f"there is no strategy {name!r}, expected one of {', '.join(names())}")
    try:
        return policy_named(name).model_validate({} if options is None else options)
    except ValidationError as refusal:
        first = refusal.errors(include_url=False)[0]
        where = ".".join(map(str, (name, *first["loc"])))
        raise ValueError(f"{where}: {first['msg']}") from None


def _under_its_name(strategy: Strategy, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
    return {strategy.name: dump(strategy)}


NamedStrategy = Annotated[
    SerializeAsAny[Strategy], BeforeValidator(_by_name), WrapSerializer(_under_its_name)
]
"""A strategy that is an option of another one: in files its name, with its options below it."""


def plugin_of(strategy: Strategy) -> StrategyPlugin[Any]:
    """Return the plug-in of ``strategy``."""
    return _plugin(strategy.name)


def carried_out_by(strategy: Strategy, library: str) -> tuple[Strategy, tuple[str, ...]]:
    """Return ``strategy`` as ``library`` carries it out, and sentences about options that it ignores or rejects."""
    happening, ignored = plugin_of(strategy).carried_out_by(strategy, library)
    return happening, tuple(ignored)


def adapting(strategy: Strategy) -> Strategy | None:
    """Return a strategy that starts as ``strategy`` and adapts during training; None if no plug-in has one."""
    first = plugin_of(strategy)
    remaining = (plugin for plugin in plugins().values() if plugin is not first)
    for plugin in (first, *remaining):
        if (adaptive := plugin.adapting(strategy)) is not None:
            return cast("Strategy", adaptive)
    return None


def _plugin(name: str) -> StrategyPlugin[Any]:
    if name in COMPOSED:
        composed: StrategyPlugin[Any] = import_module(COMPOSED[name]).PLUGIN
        return composed
    return plugins()[name]
