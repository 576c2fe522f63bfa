"""The errors Headway raises.

    HeadwayError                  anything Headway reports on purpose
    ├── UserError (ValueError)    the input is at fault; the command line exits with 2
    │   ├── UnitError             a rate, size, duration or factor that cannot be read
    │   ├── TraceError            a trace that is missing, damaged, incomplete or not Headway's
    │   ├── PlanError             a plan that is damaged or does not fit the job
    │   ├── ClusterError          a cluster that is damaged or does not fit the job
    │   ├── LabError              a lab that cannot be built as asked
    │   ├── PluginError           another package's strategy that cannot be used
    │   ├── LaunchError           a command that could not be recorded or run
    │   └── UnsupportedError      a use that would be wrong under this strategy, and is refused
    ├── CommunicationError        a peer failed or fell silent while training
    └── InternalError             what runs concurrently with training failed, and no peer is at fault
    HeadwayWarning                something was ignored or assumed

Every message says what is wrong, what was got, what was expected and how to mend it, on one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadwayError(Exception):
    """Base of everything Headway raises on purpose."""


class UserError(HeadwayError, ValueError):
    """The input is at fault. ``str()`` is one line: what, got, expected, how to mend it."""

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
    """A lab cannot be built as asked."""


class PluginError(UserError):
    """Another package brings a strategy that cannot be used."""


class LaunchError(UserError):
    """A command could not be recorded or run."""


class UnsupportedError(UserError):
    """A use that would train wrongly under this strategy."""


class CommunicationError(HeadwayError, RuntimeError):
    """A peer failed or fell silent while training."""


class InternalError(HeadwayError, RuntimeError):
    """What runs concurrently with training failed on this rank, and no peer is at fault."""


class HeadwayWarning(UserWarning):
    """Something was ignored or assumed."""


def one_line(text: str, limit: int = 300) -> str:
    """Fold ``text`` into one printable line, so that foreign text cannot forge output."""
    folded = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return folded if len(folded) <= limit else folded[: limit - 1] + "…"


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra of Headway, by their own names."""
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
    """A question that names what ``text`` may be a misspelling or the beginning of; empty where nothing is near."""
    known = list(names)
    begun = [name for name in known if text and name.startswith(text)]
    near = begun[:2] or difflib.get_close_matches(text, known, n=2)
    return f"Did you mean {' or '.join(near)}?" if near else ""
