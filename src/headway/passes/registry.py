"""The passes there are: Headway's own, and classes that other packages name in the entry points ``headway.passes``."""

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
    each.name: each
    for each in (Recompute, Accumulate, OptimizerImplementation, Precision, Compile, InputWorkers)
}


@cache
def passes() -> dict[str, type[Pass]]:
    """All passes by name, Headway's own first."""
    outside = load_entry_points(GROUP, SHIPPED, _fitting, "a subclass of Pass of that name")
    return SHIPPED | {each.name: each for each in outside}


def _fitting(name: str, found: object) -> type[Pass] | None:
    if isinstance(found, type) and issubclass(found, Pass) and getattr(found, "name", "") == name:
        check_complete(found)
        return found
    return None
