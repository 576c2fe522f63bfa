"""The passes there are: classes that other packages name in entry points of the group ``headway.passes``."""

from __future__ import annotations

from functools import cache

from headway.passes.base import Pass
from headway.plugins import brought

GROUP = "headway.passes"


@cache
def passes() -> dict[str, type[Pass]]:
    """All passes by name. Raises PluginError for one of others that cannot be used."""
    return {each.name: each for each in brought(GROUP, (), _fitting, "a subclass of Pass of that name")}


def _fitting(name: str, found: object) -> type[Pass] | None:
    if isinstance(found, type) and issubclass(found, Pass) and getattr(found, "name", "") == name:
        return found
    return None
