"""What other packages add to Headway, found by entry points. One that cannot be used is left out, with one warning.

A package that is broken must stop neither a command nor somebody's training. What needs exactly what it adds, such as
a plan, asks ``why_unusable`` and refuses with that reason.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from headway.errors import one_line

A = TypeVar("A")
T = TypeVar("T")

API_VERSION = 1
"""The version of what plug-ins build on, ``headway.ext``: another number where something that worked no longer does."""

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Set where a command is started once for each rank."""
WARNED_VARIABLE = "HEADWAY_WARNED_PLUGINS"
"""The packages that this process or one that started it has warned of, so that a command does so once."""
FIX = "Mend or uninstall that package"
ANY = "*"  # the name of what is left out where entry points cannot even be listed


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of a group, and the package that brings it; ``why_not`` is "" where it can be used."""

    group: str
    name: str
    value: str
    package: str
    why_not: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.group}) of the package {self.package}"


_loaded: dict[str, list[Plugin]] = {}


def load_entry_points(
    group: str, reserved: Container[str], fits: Callable[[str, object], T | None], expected: str
) -> list[T]:
    """What the entry points of ``group`` name, in the order of their names; what cannot be used is left out.

    ``fits`` gets a name and what stands there, and returns it where it is ``expected``, else None. What has a
    ``reserved`` name, or one that two packages use, cannot be used either.
    """
    usable: list[T] = []
    plugins = _loaded[group] = []
    try:
        entries = sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))
    except Exception as error:  # one package's damaged list keeps Python from reading any
        plugins.append(Plugin(group, ANY, "", "?", f"entry points cannot be listed: {_reason(error)}"))
        entries = []
    times = Counter(entry.name for entry in entries)
    for entry in entries:
        why_not = ""
        if entry.name in reserved:
            why_not = "Headway has one of that name itself"
        elif times[entry.name] > 1:
            why_not = "another package uses the same name"
        else:
            try:
                fitting = fits(entry.name, loaded := entry.load())
            except (Exception, SystemExit) as error:  # whatever a foreign package does when it is imported
                why_not = f"{entry.value} cannot be loaded: {_reason(error)}"
            else:
                declared = getattr(loaded, "api_version", API_VERSION)
                if declared != API_VERSION:
                    why_not = f"it is for version {declared!r} of headway.ext, expected {API_VERSION}"
                elif fitting is None:
                    why_not = f"{entry.value} is {type(loaded).__name__}, expected {expected}"
                else:
                    usable.append(fitting)
        plugins.append(Plugin(group, entry.name, entry.value, _package(entry), why_not))
    for plugin in plugins:
        if plugin.why_not:
            warn(plugin.package, f"the plug-in {plugin} is left out: {plugin.why_not}")
    return usable


def loaded_plugins() -> list[Plugin]:
    """The plug-ins of all groups that were loaded so far, usable or not."""
    return [plugin for plugins in _loaded.values() for plugin in plugins]


def why_unusable(group: str, name: object) -> str:
    """Why what an installed package calls ``name`` cannot be used, in a sentence; "" where no package has it."""
    for plugin in _loaded.get(group, ()):
        if plugin.why_not and plugin.name in (name, ANY):
            return f"the plug-in {plugin} cannot be used: {plugin.why_not}. {FIX}"
    return ""


def unknown(what: str, group: str, name: object, names: Iterable[str]) -> str:
    """What is wrong with ``name``, which is none of the ``names`` that are usable in the ``group``."""
    return why_unusable(group, name) or f"unknown {what} {name!r}, expected one of {', '.join(names)}"


def answers(what: str, asked: Iterable[tuple[str, T]], question: Callable[[T], A]) -> Iterator[tuple[str, A]]:
    """What each of the named strategies, passes or codecs answers, with its name.

    One of another package that raises is left out, with a warning; Headway's own may raise.
    """
    for name, plugin in asked:
        try:
            answer = question(plugin)
        except Exception as error:
            module = (plugin if isinstance(plugin, type) else type(plugin)).__module__
            if module.partition(".")[0] == "headway":
                raise
            warn(module, f"the {what} {name} of {module} is left out: it raised {_reason(error)}")
            continue
        yield name, answer


def warn(package: str, text: str) -> None:
    """Print a warning about a package once: not again by processes that this one starts, nor by other ranks.

    It is no ``warnings.warn``, which a script may have made an error.
    """
    warned = os.environ.get(WARNED_VARIABLE, "").split(os.pathsep)
    if package in warned or not _is_first_rank():
        return
    os.environ[WARNED_VARIABLE] = os.pathsep.join(filter(None, (*warned, package)))
    print(f"headway: warning: {one_line(text, 500)}. {FIX}.", file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank."""
    torch_distributed = sys.modules.get("torch.distributed")
    if (
        torch_distributed is not None
        and torch_distributed.is_available()
        and torch_distributed.is_initialized()
    ):
        return bool(torch_distributed.get_rank() == 0)
    return next(filter(None, map(os.environ.get, RANK_VARIABLES)), "0") == "0"


def _package(entry: EntryPoint) -> str:
    name = getattr(entry.dist, "name", None)
    return f"{name} {entry.dist.version}" if name and entry.dist is not None else "?"


def _reason(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 200)
