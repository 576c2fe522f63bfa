"""The strategies there are: those that come with Headway, one line each, and what other packages bring.

Another package's are found by entry points of the group ``headway.strategies``, which name ``StrategyPlugin`` objects.
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
"""Decisions that a plan has in parts, one for each dimension of its mesh: they have no name in plan files."""

AS_RECORDED: Strategy = DistributedDataParallelStrategy(bucket_cap_mb=0)
"""What lays out all-reduces of which nothing but their sizes is known: a bucket of every "parameter"."""

WITHOUT_A_PLAN: Strategy = DecoupledStrategy(tune=True)
"""What ``headway.parallelize`` does without a plan."""


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
    """Raise PluginError where an installed package has a strategy of that name that cannot be used."""
    if name not in plugins() and (why := why_unusable(GROUP, name)):
        raise PluginError(why)


def ask(
    question: Callable[[StrategyPlugin[Any]], A], *, last_first: bool = False, needed: str = ""
) -> Iterator[tuple[str, A]]:
    """What each strategy answers, with its name. One of another package that raises is left out, with a warning.

    Raises PluginFaultError where that is the strategy ``needed``.
    """
    strategies = list(plugins().items())
    return answers("strategy", reversed(strategies) if last_first else strategies, question, needed=needed)


def _fitting(name: str, candidate: object) -> StrategyPlugin[Any] | None:
    if isinstance(candidate, StrategyPlugin) and candidate.name == name:
        check_complete(candidate.policy)
        return candidate
    return None


def names() -> tuple[str, ...]:
    """The names of all strategies."""
    return tuple(plugins())


def plugin_named(name: str) -> StrategyPlugin[Any]:
    """The strategy of this name, which must be one of ``names``."""
    return plugins()[name]


def policy_named(name: str) -> type[Strategy]:
    """The class of the decisions of the strategy of this name, which must be one of ``names`` or ``COMPOSED``."""
    return _plugin(name).policy


def plugin_of(strategy: Strategy) -> StrategyPlugin[Any]:
    """What a decision belongs to."""
    return _plugin(strategy.name)


def carried_out_by(strategy: Strategy, library: str) -> tuple[Strategy, tuple[str, ...]]:
    """What ``strategy`` comes to where ``library`` has the collectives, and what of it that ignores or refuses."""
    happening, ignored = plugin_of(strategy).carried_out_by(strategy, library)
    return happening, tuple(ignored)


def adapting(strategy: Strategy) -> Strategy | None:
    """One that begins as ``strategy`` and changes while the job trains as its world does; None where none can."""
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
