"""What other packages add to Headway, found by entry points. One that cannot be used is left out, with one warning.

A package that is broken must stop neither a command nor somebody's training. What needs exactly what it adds, such as
a plan, asks ``why_unusable`` and refuses with that reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from headway.errors import HeadwayError, PluginError, one_line

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


GROUPS = {
    "strategy": "headway.strategies", "codec": "headway.codecs", "pass": "headway.passes", "reader": "headway.readers",
}  # fmt: skip
"""The entry points of each kind of plug-in."""

CONTRIB = {
    "headway.strategies": dict.fromkeys(("asynchronous-parameter-server", "local-sgd"), "headway-baselines"),
    "headway.readers": dict.fromkeys(("xplane", "jax", "mxnet", "horovod"), "headway-readers"),
}
"""What packages of Headway's own repository bring: nothing but messages is to know of it."""

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
    for entry in entries:
        why_not = ""
        if entry.name in reserved:
            why_not = "Headway has one of that name itself"
        elif others := [_package(each) for each in entries if each.name == entry.name and each is not entry]:
            verb = "use" if len(others) > 1 else "uses"
            why_not = f"the package{'s' * (len(others) > 1)} {' and '.join(others)} {verb} the same name"
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


def check_complete(kind: type) -> None:
    """Raise TypeError where ``kind``, the class of a strategy, pass or codec, lacks methods that it needs."""
    if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TypeError(f"the class {kind.__name__} lacks {', '.join(lacking)}")


def loaded_plugins() -> list[Plugin]:
    """The plug-ins of all groups that were loaded so far, usable or not."""
    return [plugin for plugins in _loaded.values() for plugin in plugins]


def why_unusable(group: str, name: object) -> str:
    """Why ``name``, which is none of the usable ones, is not; "" where nothing is known of it."""
    for plugin in _loaded.get(group, ()):
        if plugin.why_not and plugin.name in (name, ANY):
            return f"the plug-in {plugin} cannot be used: {plugin.why_not}. {FIX}"
    if package := CONTRIB.get(group, {}).get(str(name), ""):
        how = f"In a clone of Headway: pip install ./contrib/{package}"
        return f"{name} is in the package {package}, which is not installed. {how}"
    return ""


def unknown(what: str, group: str, name: object, names: Iterable[str]) -> str:
    """What is wrong with ``name``, which is none of the ``names`` that are usable in the ``group``."""
    return why_unusable(group, name) or (
        f"unknown {what} {name!r}, expected one of {', '.join(names)}. Install the package that has it, or remove it "
        "from the plan"
    )


class PluginFaultError(PluginError):
    """What a plug-in of another package raised where it was asked or called: it names both.

    ``what`` and ``name`` are the plug-in's, as in "codec" and "sign"; ``package`` is its package, and ``plugin`` says
    all three.
    """

    def __init__(self, what: str, plugin: object, reason: str) -> None:
        self.what, self.name, self.reason = what, str(getattr(plugin, "name", "?")), reason
        loaded = _package_of(what, self.name)
        self.package = loaded or _module(plugin)
        self.plugin = f"{what} {self.name} of {'the package ' if loaded else ''}{self.package}"
        super().__init__(f"the {self.plugin} cannot be used: {reason}", fix=f"{FIX}.")


@contextmanager
def asking(what: str, plugin: object) -> Iterator[None]:
    """Raise PluginFaultError for what ``plugin``, a strategy, pass, codec or reader of another package, raises in here.

    Headway's own errors, as of a pass that refuses a job, and what Headway's own plug-ins raise stay as they are. So
    does OverflowError, which replay takes for times out of range.
    """
    try:
        yield
    except (HeadwayError, OverflowError):
        raise
    except Exception as error:
        if is_own(plugin):
            raise
        raise PluginFaultError(what, plugin, f"it raised {_reason(error)}") from error


def is_own(plugin: object) -> bool:
    """Whether a strategy, pass, codec or reader, or a class of such, is of Headway itself."""
    return _module(plugin).partition(".")[0] == "headway"


def answers(
    what: str, asked: Iterable[tuple[str, T]], question: Callable[[T], A], *, needed: str = ""
) -> Iterator[tuple[str, A]]:
    """What each of the named strategies, passes, codecs or readers answers, with its name.

    One of another package that raises is left out, with a warning; Headway's own may raise. Raises PluginFaultError
    where that is the strategy ``needed``.
    """
    for name, plugin in asked:
        try:
            answer = question(plugin)
        except Exception as error:
            if is_own(plugin):
                raise
            fault = (
                error
                if isinstance(error, PluginFaultError)
                else PluginFaultError(what, plugin, f"it raised {_reason(error)}")
            )
            leave_out(fault, needed=needed)
            continue
        yield name, answer


def leave_out(fault: PluginFaultError, *, needed: str = "") -> None:
    """Warn that a plug-in is left out. Raises ``fault`` where it is the strategy ``needed``, which was asked for."""
    if fault.what == "strategy" and fault.name == needed:
        raise fault
    warn(fault.package, f"the {fault.plugin} is left out: {fault.reason}")


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


def _module(plugin: object) -> str:
    return (plugin if isinstance(plugin, type) else type(plugin)).__module__


def _package_of(what: str, name: str) -> str:
    """The package whose entry point of that name is used; "" where none is."""
    usable = (each for each in _loaded.get(GROUPS[what], ()) if not each.why_not)
    return next((each.package for each in usable if each.name == name), "")


def _package(entry: EntryPoint) -> str:
    name = getattr(entry.dist, "name", None)
    return f"{name} {entry.dist.version}" if name and entry.dist is not None else "?"


def _reason(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "), 200)
