"""The public surface is what is documented, and importing it stays light."""

from __future__ import annotations

import subprocess
import sys

from tests import limits

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
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=limits.stretched(60)).returncode
        == 0
    )


EXTRAS = ("msgspec", "scipy", "google.protobuf", "perfetto", "bokeh", "pyroute2", "sklearn", "bayes_opt")
ONLY_WITH_EXTRAS = ("headway.interop.readers.", "headway.demo.train_digits")


def test_without_extras_only_the_rooms_that_need_them_are_shut() -> None:
    code = f"""
import importlib, pkgutil, sys
for name in {EXTRAS}:
    sys.modules[name] = None
import headway
for module in pkgutil.walk_packages(headway.__path__, "headway.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ImportError as failure:
        print(module.name, failure)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=limits.stretched(120),
    )
    shut = done.stdout.splitlines()
    assert [line for line in shut if not line.startswith(ONLY_WITH_EXTRAS)] == []
    assert any("msgspec" in line for line in shut), "nothing was missing, so nothing was tested"
