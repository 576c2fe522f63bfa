from __future__ import annotations

import pytest

from headway.models.catalogue import MODELS
from headway.models.convolutional import inception_v4, resnet50
from headway.models.roofline import RTX_2080_TI, Device, layer_times, step_s
from headway.models.table import LayerTable, Work

# Images a second in fp32 training on one RTX 2080 Ti, lambdalabs.com/blog/2080-ti-deep-learning-benchmarks.
PUBLISHED_PER_S = [(resnet50(), 294), (inception_v4(), 79)]


def test_the_formula() -> None:
    device = Device("d", flops_per_s=100.0, bytes_per_s=10.0, kernel_s=0.5)
    assert device.forward_s(Work(flops=200.0, moved_bytes=30.0, kernels=4)) == 2.0 + 3.0 + 2.0


@pytest.mark.parametrize("name", MODELS)
def test_backward_is_twice_forward_and_shares_add_up(name: str) -> None:
    table = MODELS[name]()
    times = layer_times(table)
    assert sum(t.share for t in times) == pytest.approx(1)
    assert all(t.backward_s == RTX_2080_TI.backward_factor * t.forward_s for t in times)
    assert step_s(table) == pytest.approx((sum(t.forward_s for t in times), sum(t.backward_s for t in times)))


@pytest.mark.parametrize(("table", "per_s"), PUBLISHED_PER_S)
def test_modelled_throughput_is_near_the_published(table: LayerTable, per_s: float) -> None:
    assert table.samples / sum(step_s(table)) == pytest.approx(per_s, rel=0.25)
