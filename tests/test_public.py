"""The public surface is what is documented, and importing it stays light."""

from __future__ import annotations

import subprocess
import sys

import headway


def test_everything_public_is_there_and_nothing_else() -> None:
    assert sorted(headway.__all__) == [
        "Cluster", "HeadwayError", "Plan", "Trace", "__version__", "load_trace", "parallelize", "record",
    ]  # fmt: skip
    for name in headway.__all__:
        assert getattr(headway, name) is not None
    assert {"parallelize", "record"} <= set(dir(headway))


def test_importing_headway_does_not_import_torch() -> None:
    code = "import sys, headway; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
