from __future__ import annotations

import pytest
from tests.synthetic import SyntheticJob, synthetic_trace

from headway.errors import TraceError
from headway.network.fit import cluster_from_trace
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
