"""The errors Headway raises.

    HeadwayError                  anything Headway reports on purpose
    ├── UserError (ValueError)    the input is at fault; the command line exits with 2
    │   ├── UnitError             a rate, size, duration or factor that cannot be read
    │   ├── TraceError            a trace that is missing, damaged, incomplete or not Headway's
    │   ├── PlanError             a plan that is damaged or does not fit the job
    │   ├── ClusterError          a cluster that is damaged or does not fit the job
    │   ├── LabError              a lab that cannot be built as specified
    │   ├── PluginError           a plug-in of another package that cannot be used
    │   ├── LaunchError           a command that could not be recorded or run
    │   └── UnsupportedError      a use that would train wrongly under this strategy
    ├── CommunicationError        a peer failed or fell silent while training
    └── InternalError             a background thread of this rank failed, and no peer is at fault
    HeadwayWarning                something was ignored or assumed

Every message says on one line what is wrong, what it got, what it expected, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadwayError(Exception):
    """Base of everything Headway raises on purpose."""


class UserError(HeadwayError, ValueError):
    """The input is at fault. ``str()`` is one line: what is wrong, got, expected, fix."""

    def __init__(self, what: str, *, got: object = None, expected: str = "", fix: str = "") -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got {one_line(str(got))}")
        if expected:
            parts.append(f"expected {expected}")
        message = "; ".join(parts)
        super().__init__(one_line(f"{message}. {fix}" if fix else message, limit=1000))


class UnitError(UserError):
    """A rate, size, duration or factor cannot be read."""


class TraceError(UserError):
    """A trace is missing, damaged, incomplete or not Headway's."""


class PlanError(UserError):
    """A plan is damaged or does not fit the job."""


class ClusterError(UserError):
    """A cluster is damaged or does not fit the job."""


class LabError(UserError):
    """A lab cannot be built as specified."""


class PluginError(UserError):
    """A plug-in of another package cannot be used."""


class LaunchError(UserError):
    """A command could not be recorded or run."""


class UnsupportedError(UserError):
    """A use that would train wrongly under this strategy."""


class CommunicationError(HeadwayError, RuntimeError):
    """A peer failed or fell silent while training."""


class InternalError(HeadwayError, RuntimeError):
    """A background thread of this rank failed, and no peer is at fault."""


class HeadwayWarning(UserWarning):
    """Something was ignored or assumed."""


def one_line(text: str, limit: int = 300) -> str:
    """Fold ``text`` into one printable line, so that foreign text cannot forge output."""
    folded = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return folded if len(folded) <= limit else folded[: limit - 1] + "…"


def how_to_install(extra: str) -> str:
    """The pip command that installs the packages of one of Headway's extras."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        needed = [line.partition(";") for line in requires("headway") or ()]
    except PackageNotFoundError:
        needed = []
    packages = [
        f"'{name.strip()}'" for name, _, when in needed if f"extra == '{extra}'" in when.replace('"', "'")
    ]
    return f"pip install {' '.join(packages)}" if packages else f"pip install 'headway[{extra}]'"


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Suggest names that ``text`` may be a typo or a prefix of; "" if none is close."""
    candidates = list(names)
    begun = [name for name in candidates if text and name.startswith(text)]
    near = begun[:2] or difflib.get_close_matches(text, candidates, n=2)
    return f"Did you mean {' or '.join(near)}?" if near else ""
