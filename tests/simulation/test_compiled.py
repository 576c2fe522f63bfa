"""When the engine's loops are compiled."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from tests import limits

from headway.simulation import engine, kernel


def test_without_a_compiler_the_loops_are_played_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine._compiled.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    try:
        assert engine.simulate_for(10**9) is kernel.simulate
    finally:
        engine._compiled.cache_clear()


def test_small_graphs_load_no_compiler_and_large_ones_do() -> None:
    code = """
import sys
from headway.simulation import kernel
from headway.simulation.engine import WORTH_OPERATIONS, simulate_for
assert simulate_for(WORTH_OPERATIONS - 1) is kernel.simulate
assert "numba" not in sys.modules
large = simulate_for(WORTH_OPERATIONS)
assert large is not kernel.simulate
assert simulate_for(1) is large, "once it is loaded it serves all"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=limits.stretched(120))


def test_where_nothing_can_be_kept_loops_are_compiled_every_time() -> None:
    code = """
import numba.core.caching as caching
def nowhere(*_):
    raise RuntimeError("cannot cache function: no locator available")
caching.FunctionCache.__init__ = nowhere
from headway.simulation.building import OperationGraphBuilder
from headway.simulation.engine import simulate_for
from headway.simulation.engine import play
simulate_for(10**9)
builder = OperationGraphBuilder(1)
builder.operation(5, sender=0)
print(play(builder.close()).end_ns[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=limits.stretched(240),
    )
    assert done.stdout.strip() == "5"
