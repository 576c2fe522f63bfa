"""Loads plug-ins of other packages by entry points. Plug-ins that cannot be used are ignored with a warning.

A broken package must not stop a command or a training. A plan that needs its plug-in is refused with the reason from
``why_unusable``.
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
"""The version of ``headway.ext``, which plug-ins build on; it changes with every incompatible change."""

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Variables that launchers set for each rank."""
WARNED_VARIABLE = "HEADWAY_WARNED_PLUGINS"
"""The packages that this process or a parent has warned about, so that a command warns once."""
FIX = "Fix or uninstall that package"
ANY = "*"  # the name of a placeholder if entry points cannot be listed


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of a group and its package; ``why_not`` is "" if it can be used."""

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
    """Load the objects of the entry points of ``group``, in order of name; those that cannot be used are ignored.

    ``fits`` gets a name and the loaded object, and returns it if it is as ``expected``, else None. Entry points with a
    ``reserved`` name, or a name that two packages use, cannot be used either.
    """
    usable: list[T] = []
    plugins = _loaded[group] = []
    try:
        entries = sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))
    except Exception as error:  # damaged metadata of one package can break the listing of all
        plugins.append(Plugin(group, ANY, "", "?", f"entry points cannot be listed: {_reason(error)}"))
        entries = []
    for entry in entries:
        why_not = ""
        if entry.name in reserved:
            why_not = "Headway itself has one of that name"
        elif rivals := [
            _package(rival) for rival in entries if rival.name == entry.name and rival is not entry
        ]:
            verb = "use" if len(rivals) > 1 else "uses"
            why_not = f"the package{'s' * (len(rivals) > 1)} {' and '.join(rivals)} {verb} the same name"
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
    """Why the plug-in ``name`` of an installed package cannot be used, in a sentence; "" if there is none."""
    for plugin in _loaded.get(group, ()):
        if plugin.why_not and plugin.name in (name, ANY):
            return f"the plug-in {plugin} cannot be used: {plugin.why_not}. {FIX}"
    if package := CONTRIB.get(group, {}).get(str(name), ""):
        how = f"In a clone of Headway: pip install ./contrib/{package}"
        return f"{name} is in the package {package}, which is not installed. {how}"
    return ""


def unknown(what: str, group: str, name: object, names: Iterable[str]) -> str:
    """The error message for ``name``, which is not one of the usable ``names`` of ``group``."""
    return why_unusable(group, name) or (
        f"unknown {what} {name!r}, expected one of {', '.join(names)}. Install the package that has it, or remove it "
        "from the plan"
    )


class PluginFaultError(PluginError):
    """A plug-in of another package raised an error; the message names the plug-in and its package.

    ``what`` and ``name`` are the plug-in's kind and name, such as "codec" and "sign"; ``package`` is its package, and
    ``plugin`` describes all three.
    """

    def __init__(self, what: str, plugin: object, reason: str) -> None:
        self.what, self.name, self.reason = what, str(getattr(plugin, "name", "?")), reason
        loaded = _package_of(what, self.name)
        self.package = loaded or _module(plugin)
        self.plugin = f"{what} {self.name} of {'the package ' if loaded else ''}{self.package}"
        super().__init__(f"the {self.plugin} cannot be used: {reason}", fix=f"{FIX}.")


@contextmanager
def asking(what: str, plugin: object) -> Iterator[None]:
    """Turn errors raised by ``plugin``, a strategy, pass, codec or reader of another package, into PluginFaultError.

    Headway's errors (such as a pass that refuses a job), errors of Headway's own plug-ins, and OverflowError (times out
    of range in replay) pass through unchanged.
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
    """Whether a strategy, pass, codec or reader (or its class) is part of Headway."""
    return _module(plugin).partition(".")[0] == "headway"


def answers(
    what: str, named_plugins: Iterable[tuple[str, T]], question: Callable[[T], A], *, needed: str = ""
) -> Iterator[tuple[str, A]]:
    """Yield each named strategy's, pass's, codec's or reader's answer to ``question``, with its name.

    Plug-ins of other packages that raise are skipped with a warning; errors of Headway's own pass through. Raises
    PluginFaultError if the strategy ``needed`` fails.
    """
    for name, plugin in named_plugins:
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
    """Warn that a plug-in is left out. Raises ``fault`` if it is the strategy ``needed``."""
    if fault.what == "strategy" and fault.name == needed:
        raise fault
    warn(fault.package, f"the {fault.plugin} is left out: {fault.reason}")


def warn(package: str, text: str) -> None:
    """Print a warning about a package once per command: not in child processes, and only on rank 0.

    It does not use ``warnings.warn``, which a script may turn into an error.
    """
    warned = os.environ.get(WARNED_VARIABLE, "").split(os.pathsep)
    if package in warned or not _is_first_rank():
        return
    os.environ[WARNED_VARIABLE] = os.pathsep.join(filter(None, (*warned, package)))
    print(f"headway: warning: {one_line(text, 500)}. {FIX}.", file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    """Whether this process is rank 0, or not a rank."""
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
    """The package of the usable entry point of that name, or ""."""
    usable = (candidate for candidate in _loaded.get(GROUPS[what], ()) if not candidate.why_not)
    return next((candidate.package for candidate in usable if candidate.name == name), "")


def _package(entry: EntryPoint) -> str:
    name = getattr(entry.dist, "name", None)
    return f"{name} {entry.dist.version}" if name and entry.dist is not None else "?"


def _reason(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}".removesuffix(": "), 200)
