"""Predictions corrected by measured steps."""

from __future__ import annotations

import pytest

from headway.errors import UserError
from headway.prediction.calibration import MeasuredStep, calibrate, measured_steps
from headway.prediction.clusters import cluster_named
from headway.prediction.models import workload_named, workloads_named
from headway.prediction.replayed import predict
from headway.prediction.strategies import strategies_named
from headway.simulator.what_if import WhatIf


def test_a_slower_device_and_slower_links_are_found_and_more_workers_predicted() -> None:
    workload = workload_named("resnet50", None, "momentum")
    cluster = cluster_named("hdr-200g-nvlink")
    ((name, ddp),) = strategies_named(("ddp",), workload).items()
    truth = WhatIf(compute=1.3, bandwidth=0.6)
    steps_ms = {n: predict(workload, cluster.resized(n), name, ddp, truth).step_ms for n in (8, 16, 32)}
    found = calibrate({MeasuredStep(n, steps_ms[n]): workload for n in (8, 16)}, cluster, name, ddp)
    assert found.off < 0.02
    assert found.compute == pytest.approx(1.3, rel=0.05)
    more = predict(found.corrected(workload), cluster.resized(32), name, ddp, found.what_if).step_ms
    assert more == pytest.approx(steps_ms[32], rel=0.05)
    assert found.describe().startswith("Calibrated: computation takes 1.")


def test_one_step_tells_of_computation_only() -> None:
    workload = workload_named("resnet50", None, "momentum")
    cluster = cluster_named("hdr-200g-nvlink")
    ((name, ddp),) = strategies_named(("ddp",), workload).items()
    predicted_ms = predict(workload, cluster.resized(8), name, ddp).step_ms
    found = calibrate({MeasuredStep(8, 2 * predicted_ms): workload}, cluster, name, ddp)
    assert found.bandwidth == 1.0
    assert found.off < 0.02
    assert found.compute == pytest.approx(2, rel=0.05)


def test_two_batch_sizes_tell_of_computation_that_depends_on_neither() -> None:
    batches = {2: 128, 4: 64, 16: 16}
    workloads = workloads_named("resnet50", None, "momentum", batches.values(), "bf16")
    cluster = cluster_named("hdr-200g-nvlink")
    ((name, ddp),) = strategies_named(("ddp",), workloads[16]).items()
    steps_ms = {
        n: predict(workloads[samples].corrected(1.3, 12e6, 0.0), cluster.resized(n), name, ddp).step_ms
        for n, samples in batches.items()
    }
    found = calibrate(
        {MeasuredStep(n, steps_ms[n]): workloads[batches[n]] for n in (2, 4)}, cluster, name, ddp
    )
    assert found.compute == pytest.approx(1.3, rel=0.05)
    assert found.fixed_ms == pytest.approx(12, rel=0.1)
    least = predict(found.corrected(workloads[16]), cluster.resized(16), name, ddp, found.what_if)
    assert least.step_ms == pytest.approx(steps_ms[16], rel=0.03)
    assert " ms more per step at any batch size" in found.describe()


def test_measured_steps_have_a_batch_or_the_predicted_one() -> None:
    assert measured_steps(["8=1s", "8@64=320ms"]) == (MeasuredStep(8, 1000.0), MeasuredStep(8, 320.0, 64))


@pytest.mark.parametrize(
    "texts",
    [
        ["8"],
        ["8=fast"],
        ["0=1s"],
        ["8=1s", "8=2s"],
        ["eight=1s"],
        ["8@=1s"],
        ["8@0=1s"],
        ["8@4=1s", "8@4=2s"],
    ],
)
def test_what_is_no_measured_step_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"--measured|cannot be read|unit"):
        measured_steps(texts)
