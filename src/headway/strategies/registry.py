"""Registry of strategies: those shipped with Headway, and those of other packages.

Other packages register ``StrategyPlugin`` objects as entry points of the group ``headway.strategies``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, TypeVar, cast

from headway.errors import PluginError
from headway.plugins import answers, check_complete, load_entry_points, why_unusable
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.plugin import StrategyPlugin

A = TypeVar("A")

GROUP = "headway.strategies"
SHIPPED = (
    "headway.strategies.ddp.plugin",
    "headway.strategies.decoupled.plugin",
    "headway.strategies.parameter_server.plugin",
    "headway.strategies.data_parallel.asynchronous_servers.plugin",
    "headway.strategies.data_parallel.local_sgd.plugin",
    "headway.strategies.pipeline.plugin",
    "headway.strategies.partial_all_reduce.plugin",
)

COMPOSED = {"mesh": "headway.strategies.pipeline.mesh_plugin"}
"""Strategies composed of one part per mesh dimension; plan files list the parts instead of a name."""

AS_RECORDED: Strategy = DistributedDataParallelStrategy(bucket_cap_mb=0)
"""Lays out recorded all-reduces of which only sizes are known: one bucket per "parameter"."""

WITHOUT_A_PLAN: Strategy = DecoupledStrategy(tune=True)
"""Strategy of ``headway.parallelize`` without a plan."""


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
