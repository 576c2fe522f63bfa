from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.errors import TraceError
from headway.network.fit import NCCL_LATENCY_US, BusyPeriod, _fit, cluster_from_trace
from headway.trace.events import texts
from headway.trace.format import Trace


def placed(hosts: tuple[str, ...]) -> Trace:
    trace = synthetic_trace(SyntheticJob(world_size=len(hosts)))
    ranks = tuple(
        info.model_copy(update={"host": host}) for info, host in zip(trace.manifest.ranks, hosts, strict=True)
    )
    return Trace(trace.path, trace.manifest.model_copy(update={"ranks": ranks}), trace.model, trace.events)


def test_ranks_of_a_host_that_follow_each_other_are_its_workers() -> None:
    cluster = cluster_from_trace(placed(("b", "b", "a", "a", "a")))
    assert [(host.name, host.workers) for host in cluster.hosts] == [("b", 2), ("a", 3)]


def test_ranks_that_alternate_between_hosts_are_refused() -> None:
    with pytest.raises(TraceError, match="not supported yet; got rank 2 on a again, after b"):
        cluster_from_trace(placed(("a", "b", "a", "b")))


def test_the_library_is_that_of_the_recorded_group() -> None:
    trace = placed(("a", "b"))
    assert cluster_from_trace(trace).library == "gloo"
    for backend, library in (("nccl", "nccl"), ("cpu:gloo,cuda:nccl", "gloo")):
        ranks = tuple(info.model_copy(update={"backend": backend}) for info in trace.manifest.ranks)
        manifest = trace.manifest.model_copy(update={"ranks": ranks})
        assert cluster_from_trace(Trace(trace.path, manifest, trace.model, trace.events)).library == library


def as_nccls(trace: Trace) -> Trace:
    """As a profiler records a group whose backend nobody named: kernels have names."""
    events = {
        rank: replace(own, algorithm=texts(["ncclDevKernel_AllReduce_Sum_f32_RING_LL"] * len(own)))
        for rank, own in trace.events.items()
    }
    ranks = tuple(info.model_copy(update={"backend": "undefined"}) for info in trace.manifest.ranks)
    return replace(trace, manifest=trace.manifest.model_copy(update={"ranks": ranks}), events=events)


def test_kernels_tell_nccl_whatever_the_group_is_called() -> None:
    trace = as_nccls(placed(("a", "a", "b", "b")))
    cluster = cluster_from_trace(trace)
    assert cluster.library == "nccl"
    assert cluster.latency_us == NCCL_LATENCY_US


def test_ranks_of_a_host_are_no_slower_to_each_other_than_hosts() -> None:
    quick = synthetic_trace(SyntheticJob(world_size=4, ranks_a_host=2, gbps=300.0, latency_ms=0.0))
    cluster = cluster_from_trace(quick)
    assert cluster.local_gbps == cluster.hosts[0].up_gbps == pytest.approx(300, rel=0.1)


def periods_of(disturbed: int = 0) -> list[BusyPeriod]:
    """Collectives that take 2 ms each and 10 ns a byte; ``disturbed`` of the periods take five times as long."""
    generator = random.Random(1)
    periods = []
    for number in range(40):
        count, wire_bytes = generator.randint(1, 4), generator.uniform(1e5, 3e6)
        duration_ns = round(2e6 * count + 10 * wire_bytes)
        periods.append(BusyPeriod(count, wire_bytes, duration_ns * (5 if number < disturbed else 1)))
    return periods


@pytest.mark.parametrize("disturbed", [0, 8])
def test_rate_and_overhead_are_found_whatever_disturbs_a_few_periods(disturbed: int) -> None:
    fit = _fit(periods_of(disturbed))
    assert fit.overhead_ns == pytest.approx(2e6, rel=0.05)
    assert fit.ns_per_byte == pytest.approx(10, rel=0.02)
    assert fit.error < 0.01


def test_the_error_of_a_fit_is_its_median() -> None:
    periods = [BusyPeriod(1, 1e6, 10_000_000), BusyPeriod(1, 1e6, 11_000_000), BusyPeriod(1, 1e6, 9_000_000)]
    fit = _fit(periods)  # of one size: no overhead to tell apart
    assert fit.overhead_ns == 0
    assert fit.ns_per_byte == pytest.approx(10)
    assert fit.error == pytest.approx(1 / 11, rel=0.02)
