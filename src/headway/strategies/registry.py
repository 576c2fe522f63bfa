"""The strategies there are: those that come with Headway, one line each, and what other packages bring.

Another package's are found by entry points of the group ``headway.strategies``, which name ``StrategyPlugin`` objects.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from headway.errors import PluginError
from headway.strategies.base import Strategy
from headway.strategies.data_parallel.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.data_parallel.decoupled.policy import DecoupledStrategy
from headway.strategies.plugin import StrategyPlugin

GROUP = "headway.strategies"
SHIPPED = (
    "headway.strategies.data_parallel.ddp.plugin",
    "headway.strategies.data_parallel.decoupled.plugin",
    "headway.strategies.data_parallel.parameter_server.plugin",
)

AS_RECORDED: Strategy = DistributedDataParallelStrategy(bucket_cap_mb=0)
"""What lays out all-reduces of which nothing but their sizes is known: a bucket of every "parameter"."""

WITHOUT_A_PLAN: Strategy = DecoupledStrategy(tune=True)
"""What ``headway.parallelize`` does without a plan."""


@cache
def plugins() -> dict[str, StrategyPlugin[Any]]:
    """All strategies by name, Headway's own first. Raises PluginError for one of others that cannot be used."""
    found: dict[str, StrategyPlugin[Any]] = {}
    for module in SHIPPED:
        plugin: StrategyPlugin[Any] = import_module(module).PLUGIN
        found[plugin.name] = plugin
    for entry in sorted(entry_points(group=GROUP), key=lambda each: (each.name, each.value)):
        found.setdefault(*_loaded(entry.name, entry.value, entry.load, found))
    return found


def _loaded(
    name: str, value: str, load: Any, found: dict[str, StrategyPlugin[Any]]
) -> tuple[str, StrategyPlugin[Any]]:
    try:
        plugin = load()
    except Exception as error:  # whatever a foreign package raises is its own fault
        raise PluginError(
            f"the strategy {name!r} of another package cannot be loaded", got=f"{type(error).__name__}: {error}",
            expected=f"a StrategyPlugin at {value}", fix="Mend or uninstall that package.",
        ) from error  # fmt: skip
    if not isinstance(plugin, StrategyPlugin) or plugin.name != name or name in found:
        got = f"another {name!r}" if name in found else f"{type(plugin).__name__} at {value}"
        raise PluginError(
            f"the strategy {name!r} of another package cannot be used", got=got,
            expected=f"a StrategyPlugin whose policy is named {name!r}, as no other is",
            fix="Mend or uninstall that package.",
        )  # fmt: skip
    return name, plugin


def names() -> tuple[str, ...]:
    """The names of all strategies."""
    return tuple(plugins())


def plugin_named(name: str) -> StrategyPlugin[Any]:
    """The strategy of this name, which must be one of ``names``."""
    return plugins()[name]


def plugin_of(strategy: Strategy) -> StrategyPlugin[Any]:
    """What a decision belongs to."""
    return plugins()[strategy.name]
