"""NCCL's own model, against the tables that NCCL 2.27.5 logs on H100 (as published in meta-pytorch/autoparallel)."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cluster import Cluster, Host, NcclModel
from headway.collectives.dataflow import expand_nccl
from headway.collectives.nccl import PROTOCOLS, Fabric, Kind, choose, fabric_of, time_us, tuned
from headway.collectives.resources import ClusterResources
from headway.simulation.engine import play

TABLE = list(csv.DictReader(Path(__file__).with_name("nccl_2_27_h100.csv").read_text().splitlines()))
CARD_GB_S = 48.0


def h100(a_host: int) -> Fabric:
    """Hosts of H100 with a card of 400 Gbit/s for each GPU."""
    return Fabric(outside_gb_s=CARD_GB_S * a_host, channels=min(8, 2 * a_host), nvls=True)


def test_every_entry_of_nccls_tables_is_reproduced() -> None:
    compared = 0
    for row in TABLE:
        hosts, a_host = int(row["hosts"]), int(row["gpus_a_host"])
        kinds = ["all_reduce"] if row["kind"] == "all_reduce" else ["all_gather", "reduce_scatter"]
        for kind in kinds:
            for protocol in PROTOCOLS:
                if not row[f"{protocol}_us"]:
                    continue
                algorithm: Any = row["algorithm"]
                found = tuned(kind, algorithm, protocol, hosts * a_host, hosts, h100(a_host))
                assert found.latency_us == pytest.approx(float(row[f"{protocol}_us"]), abs=0.051), row
                assert found.gb_s == pytest.approx(float(row[f"{protocol}_gb_s"]), abs=0.051), row
                compared += 2
    assert compared == 500


def test_latency_decides_for_small_tensors_and_bandwidth_for_large_ones() -> None:
    small = choose("all_reduce", 2**16, 512, 64, h100(8))
    large = choose("all_reduce", 2**32, 64, 8, h100(8))
    assert small.algorithm == "tree"
    assert (large.algorithm, large.protocol) == ("ring", "simple")
    assert small.time_us < 0.1 * (time_us("all_reduce", "ring", "ll", 2**16, 512, 64, h100(8)) or 0)


def test_nccl_does_not_know_what_is_not_reached() -> None:
    known, poor = h100(8), replace(h100(8), reached=0.5, network_factor=2.0)
    for power in range(10, 34):
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            expected, taken = (choose(kind, 2.0**power, 64, 8, each) for each in (known, poor))
            assert taken[:2] == expected[:2]
            assert taken.time_us >= expected.time_us


def cluster(hosts: int, workers: int = 8) -> Cluster:
    gbps = CARD_GB_S * 8 * workers
    return Cluster(
        hosts=tuple(
            Host(name=f"h{at}", workers=workers, up_gbps=gbps, down_gbps=gbps) for at in range(hosts)
        ),
        library="nccl",
        nccl=NcclModel(nvls=False),
    )


def test_a_communicator_of_one_worker_a_host_has_one_card_of_each() -> None:
    assert fabric_of(cluster(4), range(4), 1).outside_gb_s == CARD_GB_S
    assert fabric_of(cluster(4), range(4), 8).outside_gb_s == 8 * CARD_GB_S


def test_workers_that_share_a_card_have_all_of_it() -> None:
    shared = cluster(4, 4).model_copy(update={"nccl": NcclModel(cards_gb_s=4 * CARD_GB_S, cards=1)})
    for a_host in (1, 4):
        fabric = fabric_of(shared, range(4), a_host)
        assert fabric.outside_gb_s * fabric.reached == 4 * CARD_GB_S


def played_us(on: Cluster, groups: list[tuple[int, ...]], size_bytes: int) -> float:
    """How long collectives of several groups take that begin together."""
    resources = ClusterResources(on)
    builder = resources.builder()
    for connection, group in enumerate(groups):
        begins, ends = ([builder.operation() for _ in group] for _ in range(2))
        expand_nccl(
            builder, resources, "all_reduce", size_bytes, begins, ends, connection=connection, members=group
        )
    return float(play(builder.close()).end_ns.max()) / 1e3


def test_a_collective_in_a_graph_takes_what_the_model_says() -> None:
    on, size_bytes = cluster(4), 2**28
    everybody = tuple(range(32))
    expected = choose("all_reduce", size_bytes, 32, 4, fabric_of(on, range(4), 8))
    assert played_us(on, [everybody], size_bytes) == pytest.approx(expected.time_us, rel=1e-6)


def test_groups_with_cards_of_their_own_do_not_hold_each_other_up() -> None:
    on, size_bytes = cluster(4), 2**28
    groups = [tuple(range(place, 32, 8)) for place in range(8)]
    assert played_us(on, groups, size_bytes) == pytest.approx(played_us(on, groups[:1], size_bytes), rel=0.02)


def test_collectives_of_all_cards_share_them() -> None:
    on, size_bytes, everybody = cluster(4), 2**30, tuple(range(32))
    one_us, two_us = (played_us(on, [everybody] * count, size_bytes) for count in (1, 2))
    assert two_us == pytest.approx(2 * one_us, rel=0.1)


@pytest.mark.parametrize("fabric", [
    Fabric(),
    Fabric("ampere", "amd", 235.0, 192.0, reached=0.66, tree_factor=1.8, passing_gb_s=235.0),
    Fabric(reached=0.8, network_factor=2.0),
])  # fmt: skip
def test_no_faster_network_makes_a_collective_slower(fabric: Fabric) -> None:
    draw = random.Random(1)
    for _ in range(500):
        hosts, a_host = draw.choice([2, 3, 4, 8, 16, 64]), draw.choice([1, 2, 4, 8])
        kind: Kind = draw.choice(("all_reduce", "all_gather"))
        size_bytes = 2 ** draw.uniform(8, 34)
        bandwidth, latency = draw.choice([1.1, 1.5, 2, 10, 100]), draw.choice([1, 0.5, 0.1])
        faster = replace(
            fabric, inside_gb_s=fabric.inside_gb_s * bandwidth, outside_gb_s=fabric.outside_gb_s * bandwidth,
            passing_gb_s=fabric.passing_gb_s * bandwidth, network_factor=fabric.network_factor * latency,
            scaled=(bandwidth, latency),
        )  # fmt: skip
        before, after = (
            choose(kind, size_bytes, a_host * hosts, hosts, network) for network in (fabric, faster)
        )
        assert after.time_us <= before.time_us * 1.0005, (kind, size_bytes, hosts, a_host, bandwidth, latency)
