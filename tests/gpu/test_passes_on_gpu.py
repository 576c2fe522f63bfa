"""Passes on CUDA tensors: over NCCL with one rank, over Gloo with two on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
from tests import workers
from tests.behaviour.pass_cases import STRATEGIES
from tests.gpu.setups import NCCL, needs_gpu

ON_DEVICE = "tests.gpu.on_device:called"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    needs_gpu,
    pytest.mark.parametrize(("backend", "ranks"), [(NCCL, 1), ("gloo", 2)]),
]


def on_device(backend: str, ranks: int, function: str, *arguments: Any) -> Any:
    return workers.run(
        ranks, ON_DEVICE, f"tests.behaviour.{function}", *arguments, backend=backend, timeout_s=150
    )  # fmt: skip


@pytest.mark.parametrize("named", ["recompute", "accumulate"])
def test_same_training(backend: str, ranks: int, named: str) -> None:
    for found in on_device(backend, ranks, "pass_cases:both", named):
        for strategy, (plain, changed) in found.items():
            expected = plain if named == "recompute" else pytest.approx(plain, rel=1e-9)
            assert changed == expected, strategy


def test_optimizers(backend: str, ranks: int) -> None:
    for found in on_device(backend, ranks, "optimizer_pass_cases:switched"):
        for strategy, ((stock, _), (foreach, in_foreach), (fused, in_fused)) in found.items():
            assert (in_foreach, in_fused) == ([True, None], [None, True]), strategy
            assert foreach == pytest.approx(stock, rel=1e-9), strategy
            assert fused == pytest.approx(stock, rel=1e-9), strategy


def test_autocast(backend: str, ranks: int) -> None:
    for found in on_device(backend, ranks, "precision_pass_cases:trained"):
        reference = found["alone"]
        distance = max(abs(a - b) for a, b in zip(reference, found["float32"], strict=True))
        assert distance > 1e-4, "something is rounded"
        for strategy in STRATEGIES:
            assert found[strategy] == pytest.approx(reference, rel=1e-5, abs=distance / 20), strategy


def test_float16(backend: str, ranks: int) -> None:
    for found in on_device(backend, ranks, "float16_pass_cases:trained"):
        reference, scale = found["alone"]
        for strategy in STRATEGIES:
            values, own_scale = found[strategy]
            assert own_scale == scale, strategy
            assert values == pytest.approx(reference, rel=1e-3, abs=1e-4), strategy


def test_compiled_modules(backend: str, ranks: int) -> None:
    for found in on_device(backend, ranks, "compile_pass_cases:trained"):
        for strategy in STRATEGIES:
            assert found[strategy] == pytest.approx(found["alone"], rel=1e-9, abs=1e-12), strategy
