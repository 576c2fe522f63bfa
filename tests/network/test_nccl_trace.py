"""A cluster from the trace of an NCCL job: NCCL's own model where it explains what was recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnosis import nccl_jobs
from tests.diagnosis.nccl_jobs import BACKWARD, FORWARD, Ask, Await, Compute, Job, documents, play

from headway.collectives.nccl import Fabric, choose, fabric_of
from headway.interop.readers.importing import import_trace
from headway.network.fit import cluster_from_trace
from headway.replayer.replayer import Replayer
from headway.simulator.what_if import WhatIf
from headway.trace.folder import load_trace
from headway.trace.format import Trace

HOSTS, A_HOST = 4, 2
FABRIC = Fabric(outside_gb_s=48.0 * A_HOST, channels=2 * A_HOST, reached=0.9)
SIZES = [2**26, 2**25, 2**24]


def by_nccl(_job: Job, ask: Ask) -> float:
    """What NCCL's model has a collective take."""
    return choose("all_reduce", ask.size_bytes, HOSTS * A_HOST, HOSTS, FABRIC).time_us


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setattr(nccl_jobs, "took_us", by_nccl)
    programme: list[nccl_jobs.Operation] = [Compute(8, FORWARD)]
    for number, size_bytes in enumerate(SIZES):
        programme += [Compute(5, BACKWARD), Ask("dp", "all_reduce", size_bytes, BACKWARD, key=str(number))]
    programme += [Await(str(number)) for number in range(len(SIZES))]
    world = HOSTS * A_HOST
    hosts = [f"h{rank // A_HOST}" for rank in range(world)]
    made = Job(
        "ddp", [programme] * world, {"dp": tuple(range(world))}, {"dp": 1.0}, hosts, steps=6, noise=0.001
    )
    (tmp_path / "in").mkdir()
    for name, data in documents(made, play(made)).items():
        (tmp_path / "in" / name).write_bytes(data)
    import_trace(tmp_path / "in", tmp_path / "trace")
    return load_trace(tmp_path / "trace")


def test_the_model_explains_what_was_recorded_and_predicts_more_hosts(trace: Trace) -> None:
    cluster = cluster_from_trace(trace)
    assert cluster.nccl is not None
    assert cluster.nccl.architecture == "hopper"
    replayer = Replayer(trace)
    assert replayer.base.step_ms == pytest.approx(replayer.recorded_step_ms, rel=0.03)
    many = cluster.resized(64 * A_HOST)
    expected = choose("all_reduce", 2**24, 64 * A_HOST, 64, FABRIC)
    predicted = choose("all_reduce", 2**24, 64 * A_HOST, 64, fabric_of(many, range(64), A_HOST))
    assert predicted.time_us == pytest.approx(expected.time_us, rel=0.1)


def test_traces_of_amd_gpus_are_fitted_as_rings(trace: Trace) -> None:
    ranks = tuple(rank.model_copy(update={"device": "AMD Instinct MI300X"}) for rank in trace.manifest.ranks)
    of_amd = replace(trace, manifest=trace.manifest.model_copy(update={"ranks": ranks}))
    assert cluster_from_trace(of_amd).nccl is None


def test_a_faster_network_is_replayed_as_one(trace: Trace) -> None:
    replayer = Replayer(trace)
    slower, faster = (
        replayer.replay(what_if=WhatIf.parse([f"bandwidth={factor}"])).step_ms for factor in ("0.5x", "2x")
    )
    assert faster < replayer.base.step_ms < slower
