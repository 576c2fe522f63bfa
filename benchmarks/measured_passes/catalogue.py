"""The cases: a pass, the kind of job that it is tried on, and what it is expected to do there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.passes.accumulate import Accumulate
from headway.passes.base import Pass
from headway.passes.compile import Compile
from headway.passes.input_workers import InputWorkers
from headway.passes.optimizer import OptimizerImplementation
from headway.passes.precision import Precision
from headway.passes.recompute import Recompute


@dataclass(frozen=True, slots=True)
class Case:
    """``kind`` is one of train.py's. ``expected`` is what somebody who knows the job would say before measuring.

    ``steps`` are recorded in each run: of short ones so many that a second or two tell.
    """

    name: str
    kind: str
    changed: Pass
    expected: Literal["helps", "hurts"]
    steps: int = 32


_LAYERS = tuple(map(str, range(4)))
CASES = (
    Case("compile-pointwise", "pointwise", Compile(modules=_LAYERS), "helps"),
    Case("compile-halting", "halting", Compile(modules=tuple(map(str, range(16)))), "hurts", 160),
    Case("precision-products", "products", Precision(dtype="bfloat16"), "helps"),
    Case("precision-many-small", "many-small", Precision(dtype="bfloat16"), "hurts", 120),
    Case("fused-many-small", "many-small", OptimizerImplementation(implementation="fused"), "helps", 120),
    Case("foreach-few-large", "few-large", OptimizerImplementation(implementation="foreach"), "hurts", 120),
    Case("input-slow-reading", "slow-reading", InputWorkers(workers=2), "helps"),
    Case("input-wide-samples", "wide-samples", InputWorkers(workers=2), "hurts"),
    Case("recompute-products", "products", Recompute(modules=_LAYERS), "hurts"),
    Case("accumulate-products", "products", Accumulate(micro_batches=4), "hurts"),
)
