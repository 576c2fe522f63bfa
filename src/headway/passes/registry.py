"""The available passes: Headway's own, and those of other packages' entry points in ``headway.passes``."""

from __future__ import annotations

from functools import cache

from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.compile import Compile
from headway.passes.input_workers import InputWorkers
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute
from headway.plugins import check_complete, load_entry_points

GROUP = "headway.passes"
SHIPPED: dict[str, type[Pass]] = {
    pass_type.name: pass_type
    for pass_type in (Recompute, Accumulate, OptimizerImplementation, Precision, Compile, InputWorkers)
}


@cache
def passes() -> dict[str, type[Pass]]:
    """All passes by name, Headway's own first."""
    outside = load_entry_points(GROUP, SHIPPED, _fitting, "a subclass of Pass of that name")
    return SHIPPED | {pass_type.name: pass_type for pass_type in outside}


def _fitting(name: str, loaded: object) -> type[Pass] | None:
    if isinstance(loaded, type) and issubclass(loaded, Pass) and getattr(loaded, "name", "") == name:
        check_complete(loaded)
        return loaded
    return None
