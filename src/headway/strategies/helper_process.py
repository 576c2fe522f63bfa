"""A process of rank 0's that thinks while training goes on: a module of ours, asked and answering through pipes."""

from __future__ import annotations

import os
import subprocess
import sys

OWN_VARIABLES = "HEADWAY_"


def begin(module: str) -> subprocess.Popen[bytes]:
    """Run ``module`` in a new interpreter, in which nothing of a plan or a recording is in force."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    # What is found where this process finds it, and nothing in the folder that it happens to run in.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
