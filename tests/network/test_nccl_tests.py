"""Logs of nccl-tests: reading them, and the cluster that they are of."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from headway.collectives.nccl import Fabric, choose
from headway.errors import UserError
from headway.network.nccl_tests import Timing, cluster_of, errors, fitted, is_amd, read_log, slow_hosts
from headway.prediction.collective import collective_time

PUBLISHED = Path(__file__).parents[2] / "benchmarks/published_rows/nccl_tests.csv"
BUS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def header(test: str, hosts: list[str], a_host: int, device: str = "NVIDIA H100 80GB HBM3") -> list[str]:
    """The first lines of a log, as nccl-tests 2.17 writes them."""
    lines = ["# nccl-tests version 2.17.8 nccl-headers=22705 nccl-library=22705"]
    lines.append(f"# Collective test starting: {test}_perf")
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid 26142{rank} on {hosts[rank // a_host]} device  {rank % a_host} [0000:9d:00] "
        f"{device}"
        for rank in range(len(hosts) * a_host)
    ]
    return lines


def log(hosts: int, a_host: int, reached: float, factor: float) -> str:
    """What nccl-tests would write of a network that reaches a share of its cards' 48 GB/s."""
    lines: list[str] = []
    fabric = Fabric(outside_gb_s=48.0 * a_host, channels=min(8, 2 * a_host), nvls=True)
    fabric = replace(fabric, reached=reached, network_factor=factor)
    ranks = hosts * a_host
    for test, share in BUS.items():
        lines += header(test, [f"n{at}" for at in range(hosts)], a_host)
        for power in range(20, 34):
            time_us = choose(test, 2.0**power, ranks, hosts, fabric).time_us  # type: ignore[arg-type]
            algorithm = 2**power / time_us / 1e3
            bus = algorithm * share * (ranks - 1) / ranks
            operation = "none" if test == "all_gather" else "sum"
            lines.append(
                f"  {2**power}  {2**power // 4}  float  {operation}  -1  {time_us:.2f}  {algorithm:.2f}  {bus:.2f}  0 "
                f"{time_us:.2f}  {algorithm:.2f}  {bus:.2f}  0"
            )
        lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 94.3888"]
    return "\n".join(lines)


def test_rows_are_read_with_their_test_and_their_ranks() -> None:
    rows = read_log(log(4, 8, 1.0, 1.0))
    assert len(rows) == 42
    assert {(row.ranks, row.hosts, row.architecture) for row in rows} == {(32, 4, "hopper")}
    assert [row.kind for row in rows[::14]] == ["all_reduce", "all_gather", "reduce_scatter"]


def test_lines_that_mpirun_tags_are_read_where_tags_stand_in_the_middle() -> None:
    text = "\n".join(f"[1,0]<stdout>:{line}" for line in log(2, 2, 1.0, 1.0).splitlines())
    text = text.replace("on n1 ", "on n[1,0]<stdout>:1 ")
    assert read_log(text) == read_log(log(2, 2, 1.0, 1.0))


def test_earlier_logs_tell_an_all_reduce_by_its_bandwidths() -> None:
    ranks = [
        f"#   Rank {rank:2d} Pid  6574{rank} on node{rank // 2} device  {rank % 2} [0x00] A100"
        for rank in range(4)
    ]
    row = "    67108864      16777216     float     sum   1124.3   59.69  89.53    N/A   1141.9   58.77   88.2    N/A"
    text = "\n".join([*ranks, row])
    (found,) = read_log(text)
    assert (found.kind, found.time_us, found.hosts, found.architecture) == ("all_reduce", 1124.3, 2, "ampere")


def test_the_cluster_of_logs_predicts_more_hosts() -> None:
    cluster, accuracy = cluster_of([("a.log", log(2, 8, 0.8, 1.5)), ("b.log", log(4, 8, 0.8, 1.5))])
    assert (len(cluster.hosts), cluster.hosts[0].workers, cluster.library) == (4, 8, "nccl")
    assert cluster.nccl is not None
    assert cluster.nccl.cards_gb_s == 48.0
    assert cluster.hosts[0].up_gbps == pytest.approx(0.8 * 48 * 8 * 8, rel=0.05)
    assert cluster.nccl.network_factor == pytest.approx(1.5, rel=0.25)
    assert "(median of 84 rows)" in accuracy


def test_published_logs_of_two_sizes_predict_the_others() -> None:
    rows = list(csv.DictReader(PUBLISHED.read_text().splitlines()))

    def of(*numbers: int) -> list[Timing]:
        return [
            Timing(
                "all_reduce",
                int(row["size_bytes"]),
                float(row["time_us"]),
                int(row["ranks"]),
                int(row["hosts"]),
            )
            for row in rows
            if row["source"] in [f"Echo nccl_{number}.log" for number in numbers]
        ]

    fabric, speed = fitted(of(16, 32), Fabric("ampere", "amd", 235.0, passing_gb_s=235.0, version=(2, 18)))
    judged = [row for row in of(64, 128) if row.size_bytes >= 2**20]
    far = sorted(map(abs, errors(judged, fabric, speed)))
    assert median(far) < 0.07
    assert far[int(0.9 * len(far))] < 0.15


def of_rccl(kind: str, hosts: int, times_us: dict[int, float]) -> tuple[str, str]:
    """What rccl-tests write of hosts of eight MI300X."""
    lines = header(kind, [f"n{at}" for at in range(hosts)], 8, "AMD Instinct MI300X")
    for size, us in times_us.items():
        lines.append(f" {size} {size // 4} float sum -1 {us:.1f} 1.00 1.00 0 {us:.1f} 1.00 1.00 0")
    return f"{hosts}.log", "\n".join([*lines, "rccl-tests: Version develop:5272cd1"])


def test_published_rows_of_rccl_are_predicted_as_rings() -> None:
    """Two hosts of eight MI300X, of ROCm/rccl#2078: fitted to two sizes, all four are within 1 %."""
    rows = {2**31: 11186.0, 2**32: 22410.0, 2**33: 44734.0, 2**34: 89235.0}
    cluster, accuracy = cluster_of([of_rccl("all_reduce", 2, {size: rows[size] for size in (2**31, 2**34)})])
    assert cluster.nccl is None
    assert cluster.library == "nccl"
    assert accuracy.startswith("rings are off by ")
    assert cluster.latency_us > 1, "large tensors do not tell it, and nothing is free"
    for size_bytes, time_us in rows.items():
        assert collective_time(cluster, "all-reduce", size_bytes).time_us == pytest.approx(time_us, rel=0.01)


def test_rings_of_rccl_are_fitted_over_numbers_of_hosts() -> None:
    def times_us(hosts: int) -> dict[int, float]:
        ranks = 8 * hosts
        sizes = [2**power for power in range(20, 33, 2)]
        return {size: 40 + 4 * hosts * 12 + 2 * (ranks - 1) / ranks * size / 300e3 for size in sizes}

    cluster, _ = cluster_of([of_rccl("all_reduce", hosts, times_us(hosts)) for hosts in (2, 4)])
    assert cluster.hosts[0].up_gbps == pytest.approx(2400, rel=0.01)
    more = cluster.model_copy(update={"hosts": cluster.hosts * 2})
    assert collective_time(more, "all-reduce", 2**30).time_us == pytest.approx(times_us(8)[2**30], rel=0.05)
    with pytest.raises(UserError, match="the logs have no row for several hosts"):
        cluster_of([of_rccl("all_reduce", 1, times_us(1))])


@pytest.mark.parametrize(("device", "amd"), [
    ("AMD Instinct MI250X", True), ("gfx942", True), ("NVIDIA H100 80GB HBM3", False), ("", False),
])  # fmt: skip
def test_amd_gpus_are_told_by_their_names(device: str, amd: bool) -> None:
    assert is_amd(device) is amd


def test_what_is_no_log_is_refused() -> None:
    with pytest.raises(UserError, match=r"hello\.txt is not a log of nccl-tests"):
        read_log("hello", "hello.txt")


def test_the_slow_host_of_pairs_is_named() -> None:
    def pair(one: int, other: int) -> str:
        gb_s = 22.0 if 3 in (one, other) else 40.0
        return "\n".join(
            [*header("sendrecv", [f"n{one}", f"n{other}"], 1), f"# Avg bus bandwidth    : {gb_s}"]
        )

    found = slow_hosts(pair(one, other) for one in range(5) for other in range(one))
    assert found == {"n3": pytest.approx(0.55)}
