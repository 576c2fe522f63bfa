"""Headway: see, predict and choose the communication of distributed training.

The loop in code: ``record`` a job's steps, ``load_trace`` and ``diagnose`` them, ``replay`` them under changes,
``optimize``, and ``parallelize`` a model with the plan that was found. ``predict`` needs no recording.
"""

import os
import sys


def _leave_out_the_current_folder() -> None:
    """Keep ``python -m headway...`` from importing modules of the current folder, like the ``headway`` command.

    Python puts that folder first on the path, so a ``random.py`` in it would be run.
    """
    words = sys.orig_argv[1:] if sys.argv[:1] == ["-m"] else []
    for at, word in enumerate(words):
        if word.startswith("-m") or (word[:1] == "-" and word[1:].isalpha() and word[-1] == "m"):
            module = word[2:] if word[:2] == "-m" and word != "-m" else "".join(words[at + 1 : at + 2])
            here = sys.path[:1] in ([""], [os.getcwd()])
            if module.partition(".")[0] == "headway" and here and not sys.flags.safe_path:
                del sys.path[0]
            return


_leave_out_the_current_folder()

import importlib  # noqa: E402 - from here on it is safe to
from typing import TYPE_CHECKING, Any  # noqa: E402

from headway.errors import (  # noqa: E402
    ClusterError,
    CommunicationError,
    HeadwayError,
    HeadwayWarning,
    InternalError,
    LabError,
    LaunchError,
    PlanError,
    PluginError,
    TraceError,
    UnitError,
    UnsupportedError,
    UserError,
)
from headway.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from headway.api import Optimized, Replayed, diagnose, optimize, predict, replay, strategy
    from headway.cluster import Cluster
    from headway.diagnosis.diagnosis import Diagnosis
    from headway.integrations.parallelize import finish, parallelize
    from headway.plan import Plan
    from headway.recording.attach import record
    from headway.strategies.ddp.runtime import compression_state, load_compression_state
    from headway.trace.folder import load_trace
    from headway.trace.format import Trace

__all__ = [
    "Cluster",
    "ClusterError",
    "CommunicationError",
    "Diagnosis",
    "HeadwayError",
    "HeadwayWarning",
    "InternalError",
    "LabError",
    "LaunchError",
    "Optimized",
    "Plan",
    "PlanError",
    "PluginError",
    "Replayed",
    "Trace",
    "TraceError",
    "UnitError",
    "UnsupportedError",
    "UserError",
    "__version__",
    "compression_state",
    "diagnose",
    "finish",
    "load_compression_state",
    "load_trace",
    "optimize",
    "parallelize",
    "predict",
    "record",
    "replay",
    "strategy",
]

# Imported on first use: torch takes seconds to import, and most commands do not need it.
_LAZY = {
    "Cluster": "headway.cluster",
    "Diagnosis": "headway.diagnosis.diagnosis",
    "Optimized": "headway.api",
    "Plan": "headway.plan",
    "Replayed": "headway.api",
    "Trace": "headway.trace.format",
    "compression_state": "headway.strategies.ddp.runtime",
    "diagnose": "headway.api",
    "finish": "headway.integrations.parallelize",
    "load_compression_state": "headway.strategies.ddp.runtime",
    "load_trace": "headway.trace.folder",
    "optimize": "headway.api",
    "parallelize": "headway.integrations.parallelize",
    "predict": "headway.api",
    "record": "headway.recording.attach",
    "replay": "headway.api",
    "strategy": "headway.api",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value  # importing a submodule of this name has bound the module
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
