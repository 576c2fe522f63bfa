"""Predictions corrected by measured steps."""

from __future__ import annotations

import pytest

from headway.errors import UserError
from headway.prediction.calibration import calibrate, measured_steps
from headway.prediction.clusters import cluster_named
from headway.prediction.models import workload_named
from headway.prediction.replayed import predict
from headway.prediction.strategies import strategies_named
from headway.replayer.what_if import WhatIf


def test_a_slower_device_and_slower_links_are_found_and_more_workers_predicted() -> None:
    workload = workload_named("resnet50", None, "momentum")
    cluster = cluster_named("hdr-200g-nvlink")
    ((name, ddp),) = strategies_named(("ddp",), workload).items()
    truth = WhatIf(compute=1.3, bandwidth=0.6)
    steps_ms = {n: predict(workload, cluster.resized(n), name, ddp, truth).step_ms for n in (8, 16, 64)}
    found = calibrate(workload, cluster, name, ddp, {n: steps_ms[n] for n in (8, 16)})
    assert found.off < 0.02
    assert found.compute == pytest.approx(1.3, rel=0.05)
    more = predict(workload, cluster.resized(64), name, ddp, found.what_if).step_ms
    assert more == pytest.approx(steps_ms[64], rel=0.05)
    assert found.describe().startswith("Calibrated: computation takes 1.")


def test_one_step_tells_of_computation_only() -> None:
    workload = workload_named("resnet50", None, "momentum")
    cluster = cluster_named("hdr-200g-nvlink")
    ((name, ddp),) = strategies_named(("ddp",), workload).items()
    predicted_ms = predict(workload, cluster.resized(8), name, ddp).step_ms
    found = calibrate(workload, cluster, name, ddp, {8: 2 * predicted_ms})
    assert found.bandwidth == 1.0
    assert found.off < 0.02
    assert found.compute == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("texts", [["8"], ["8=fast"], ["0=1s"], ["8=1s", "8=2s"], ["eight=1s"]])
def test_what_is_no_measured_step_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match=r"--measured|cannot be read|unit"):
        measured_steps(texts)
