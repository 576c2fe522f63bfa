"""What other packages bring to Headway, found by entry points."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from importlib.metadata import entry_points
from typing import TypeVar

from headway.errors import PluginError

T = TypeVar("T")

API_VERSION = 1
"""The version of what plug-ins build on, ``headway.ext``: another number where something that worked no longer does."""


def brought(
    group: str, known: Container[str], fits: Callable[[str, object], T | None], expected: str
) -> Iterator[T]:
    """What the entry points of ``group`` name, in the order of their names.

    ``fits`` is given a name and what stands there, and gives it back where it is ``expected``, else None. Raises
    PluginError for what cannot be loaded, does not fit or has a name that is ``known``.
    """
    seen: set[str] = set()
    for entry in sorted(entry_points(group=group), key=lambda each: (each.name, each.value)):
        what, fix = (
            f"{entry.name!r} of the entry points {group}",
            "Mend or uninstall the package that brings it.",
        )
        if entry.name in known or entry.name in seen:
            raise PluginError(
                f"{what} is registered twice", got=entry.value, expected="a name of its own", fix=fix
            )
        seen.add(entry.name)
        try:
            found = entry.load()
        except Exception as error:  # whatever a foreign package raises is its own fault
            got = f"{type(error).__name__}: {error}"
            raise PluginError(f"{what} cannot be loaded", got=got, expected=expected, fix=fix) from error
        declared = getattr(found, "api_version", API_VERSION)
        if declared != API_VERSION:
            raise PluginError(
                f"{what} is for another version of headway.ext", got=f"api_version {declared!r}",
                expected=f"{API_VERSION}", fix="Install a version of the package that fits this Headway.",
            )  # fmt: skip
        fitting = fits(entry.name, found)
        if fitting is None:
            got = f"{type(found).__name__} at {entry.value}"
            raise PluginError(f"{what} cannot be used", got=got, expected=expected, fix=fix)
        yield fitting
