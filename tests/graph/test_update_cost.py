from __future__ import annotations

import pytest
from tests.synthetic import SyntheticJob, events_of, trace_of

from headway.cluster import DEFERRED_UPDATE, STEP_CALL
from headway.graph.recorded import timelines_of
from headway.graph.step_layout import UpdateCost, update_cost
from headway.network.fit import cluster_from_trace
from headway.trace.events import Event, Kind, Stream


def test_the_cost_of_updates_is_a_line_over_bucket_sizes() -> None:
    sizes = {0: 1000, 1: 4000, 2: 10_000}
    found = update_cost({b: [int(50_000 + 3 * s)] for b, s in sizes.items()}, sizes, ranks=4)
    assert found.overhead_ns == pytest.approx(50_000, rel=1e-3)
    assert found.whole_ns == pytest.approx(4 * 3 * 15_000, rel=1e-2)
    assert update_cost({}, sizes, 4) == UpdateCost()
    one = update_cost({0: [40_000, 60_000, 50_000]}, sizes, 1)
    assert one.overhead_ns + one.whole_ns == 50_000


def test_what_every_recorded_update_costs_by_itself_is_not_shared_and_shows_in_the_cluster() -> None:
    """Updates of 40 us and 1 ns for every 100 bytes of their bucket, by each of two ranks."""
    ranks = events_of(
        SyntheticJob(world_size=2, steps=2, bucket_bytes=(300_000, 1_000_000, 2_000_000, 4_000_000))
    )
    whole_ns = 0.0
    for rank, rows in ranks.items():
        collectives = [row for row in rows if row.kind == Kind.COLLECTIVE and row.bucket >= 0]
        for row in collectives:
            own_ns = row.size_bytes // 100
            rows.append(
                Event(
                    Kind.UPDATE,
                    "",
                    Stream.COMMUNICATION,
                    row.step,
                    row.end_ns,
                    40_000 + own_ns,
                    bucket=row.bucket,
                )
            )
            settled = Event(Kind.UPDATE, "", Stream.COMPUTE, row.step, row.end_ns, 0, bucket=row.bucket)
            rows.append(settled._replace(start_ns=row.end_ns + 1))  # it says nothing of sizes
            whole_ns += own_ns if rank == 0 and row.step == 0 else 0
    trace = trace_of(ranks)
    assert timelines_of(trace)[0][0].optimizer_ns == pytest.approx(2 * whole_ns, rel=0.02)
    cluster = cluster_from_trace(trace)
    assert cluster.cost_of(DEFERRED_UPDATE).overhead_us == pytest.approx(40, rel=0.02)


def test_a_call_of_step_costs_what_it_does_not_wait() -> None:
    ranks = events_of(SyntheticJob(world_size=2, steps=1))
    calls_ns = []
    for rows in ranks.values():
        call = next(row for row in rows if row.kind == Kind.OPTIMIZER)
        calls_ns.append(call.duration_ns)
        rows.append(Event(Kind.WAIT, "", Stream.COMPUTE, 0, call.start_ns, call.duration_ns // 2))
        rows.append(Event(Kind.UPDATE, "", Stream.COMMUNICATION, 0, call.start_ns, 1000, bucket=0))
    found_us = cluster_from_trace(trace_of(ranks)).cost_of(STEP_CALL).overhead_us
    assert found_us == pytest.approx(sum(calls_ns) / len(calls_ns) / 2 / 1e3, rel=0.02)
