"""All-reduces by each of our algorithms and by Gloo's own, measured, predicted and against the bound.

    python benchmarks/hierarchy.py [--quick] [--only CASE] [--json FILE]

A case is a lab of hosts with several workers, or with one, whose links are shaped; the workers of a host talk over
memory. All methods run in the same processes, in turn, on tensors of several sizes. All ranks share the machine's
cores, and do nothing but communicate.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import commit, keep_case, median_interval, parse_arguments, report
from in_lab import run_in_lab

from headway.bound.cuts import cuts_of, least_byte_factor
from headway.cluster import AlgorithmCost, Cluster
from headway.collectives.algorithms import (
    ALGORITHMS,
    ALL_GATHER,
    ALL_REDUCE,
    DIRECT,
    GLOO_ALL_REDUCE,
    HALVING_DOUBLING,
    HIERARCHICAL,
    NATIVE,
    REDUCE_SCATTER,
    RING,
    TREE,
)
from headway.collectives.dataflow import alone
from headway.collectives.hierarchical import Hosts
from headway.collectives.live import prepare
from headway.collectives.selection import Algorithms, Selection, native
from headway.lab.spec import LabSpec
from headway.measuring.probe import probe_cluster
from headway.network.algorithm_choices import algorithm_choices
from headway.network.collective_costs import CANDIDATES, Effort, fitted, timings_of
from headway.network.link_cost import LinkCosts
from headway.simulation.engine import play

WORKER = "--worker"
TIMEOUT_S = 1800.0
FAR, LONG_MS = 3.0, 100.0  # as many times as the fastest, and that long
OURS = {each: each for each in (RING, HIERARCHICAL, DIRECT, HALVING_DOUBLING, TREE)}
EFFORT = Effort(
    tuple(each for each in CANDIDATES if each.name in (*OURS, GLOO_ALL_REDUCE)),
    {1_000: 10, 20_000: 6, 60_000: 4},
    repeats=2, most_repeats=2, longest_s=0.5, interference_rounds=1,
)  # fmt: skip
QUICK_SHARES_BYTES = {1_000: 6, 60_000: 4}
METHODS = {**OURS, "gloo": NATIVE}
WORDS = (
    "One all-reduce (ms; slowest rank, median over interleaved rounds, `ms95` the interval of that median): `ring`, "
    "`hierarchical`, `direct`, `halving_doubling` and `tree` as a reduce-scatter and an all-gather, as decoupled "
    "training has them, where they differ from rings, `gloo` its own all-reduce. `predicted_ms` is a replay on the "
    "cluster as `headway probe` measured it in the same processes before, which times each method at other sizes; "
    "`from_rings_ms` the same where nothing but rings had been timed. `bound_ms` is what no algorithm can beat on "
    "these links, all of it passing the slowest cut, less what links let through at once after a pause. `chosen` says "
    "which of our halves the planner gives to buckets of that size. `cpu` is what the ranks used of all cores. "
    "Nothing is paced: ranks only communicate, and share the cores of one machine."
)


@dataclass(frozen=True)
class HierarchyCase:
    """Hosts on links of one rate, and the sizes of tensors."""

    hosts: int
    workers: int
    rate_mbit: int
    sizes_mb: tuple[float, ...] = (0.004, 0.064, 1.0, 8.0)

    @property
    def name(self) -> str:
        return f"{self.hosts}x{self.workers}-{self.rate_mbit}mbit"


CASES = {
    case.name: case
    for case in (
        HierarchyCase(4, 4, 200), HierarchyCase(4, 4, 1000), HierarchyCase(2, 4, 200), HierarchyCase(16, 1, 200),
        HierarchyCase(6, 1, 200), HierarchyCase(12, 1, 200),
    )
}  # fmt: skip
QUICK = ("4x4-200mbit",)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", list(CASES))
    rows: list[dict[str, Any]] = []
    for name in [arguments.only] if arguments.only else QUICK if arguments.quick else CASES:
        own = _rows(CASES[name], _measured(CASES[name], quick=arguments.quick))
        if not arguments.quick:
            keep_case("hierarchy", own, list(CASES), WORDS)
        rows += own
    report("hierarchy", rows, arguments, WORDS)


def _measured(case: HierarchyCase, *, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        lab = LabSpec(hosts=case.hosts, workers_per_host=case.workers, rate=f"{case.rate_mbit}mbit")
        command = [sys.executable, __file__, WORKER, case.name, str(int(quick)), str(out)]
        run_in_lab(case.name, lab, command, TIMEOUT_S)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _rows(case: HierarchyCase, found: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = Cluster.model_validate(found["cluster"])
    costs, rows = LinkCosts(cluster), []
    for size in case.sizes_mb:
        size_bytes = _numel(size, cluster.world_size) * 4
        chosen = _chosen(costs, size_bytes)
        bound_ms = _bound_ms(cluster, size_bytes)
        for method, algorithm in METHODS.items():
            if not (times_ms := [1e3 * each for each in found["times_s"].get(f"{method} {size}", ())]):
                continue
            low_ms, high_ms = median_interval(times_ms)
            rows.append({
                "case": case.name, "method": method, "size_mb": size, "time_ms": round(median(times_ms), 2),
                "ms95": f"{low_ms:.1f} to {high_ms:.1f}",
                "predicted_ms": round(_predicted_ms(cluster, method, size_bytes), 2),
                "from_rings_ms": round(_predicted_ms(_rings_alone(cluster), method, size_bytes), 2),
                "bound_ms": round(bound_ms, 2), "ratio": round(median(times_ms) / bound_ms, 3),
                "chosen": algorithm in chosen, "cpu": round(found["cpu"], 2), "commit": commit(),
            })  # fmt: skip
    return rows


def _chosen(costs: LinkCosts, size_bytes: int) -> set[str]:
    """Of both halves of a bucket of this size, in the plan by sizes where there is one."""
    fastest: Algorithms = algorithm_choices(costs, size_bytes)[:2][-1]
    return {fastest.of(kind, size_bytes) for kind in (REDUCE_SCATTER, ALL_GATHER)}


def _methods(links: Cluster, size_bytes: int, *, quick: bool) -> list[str]:
    """Those that differ from rings; of ``quick`` runs without what is far slower than others by any reckoning."""
    hosts = Hosts.of_cluster(links)
    known = [
        name
        for name, algorithm in METHODS.items()
        if algorithm in (RING, NATIVE) or ALGORITHMS[algorithm].differs(hosts)
    ]
    predicted_ms = {name: _predicted_ms(links, name, size_bytes) for name in known}
    most_ms = max(FAR * min(predicted_ms.values()), LONG_MS)
    return [name for name in known if predicted_ms[name] <= most_ms or not quick]


def _bound_ms(cluster: Cluster, size_bytes: int) -> float:
    least = size_bytes * least_byte_factor(cluster)
    return (
        max(max(0.0, cut.time_ns(least) - cut.credit_ns) + cut.latency_ns for cut in cuts_of(cluster)) / 1e6
    )


def _predicted_ms(cluster: Cluster, method: str, size_bytes: int) -> float:
    return sum(
        float(play(alone(cluster, each.program_of, size_bytes, each.cost(cluster))).end_ns.max())
        for each in _selections(method, size_bytes, Hosts.of_cluster(cluster))
    ) / 1e6  # fmt: skip


def _rings_alone(cluster: Cluster) -> Cluster:
    kept: dict[str, AlgorithmCost] = {
        name: cost
        for name, cost in cluster.algorithms.items()
        if not name.startswith((HIERARCHICAL, DIRECT, HALVING_DOUBLING, TREE))
    }
    return cluster.model_copy(update={"algorithms": kept})


def _selections(method: str, size_bytes: int, hosts: Hosts) -> list[Selection]:
    world_size = sum(map(len, hosts.ranks))
    if method == "gloo":
        return [native(ALL_REDUCE, size_bytes, world_size)]
    algorithms = Algorithms(METHODS[method], METHODS[method])
    return [
        algorithms.select(kind, size_bytes, world_size).on(hosts) for kind in (REDUCE_SCATTER, ALL_GATHER)
    ]


def _numel(size_mb: float, world_size: int) -> int:
    """How many elements of 4 bytes, the same number for each rank."""
    return round(size_mb * 1e6 / 4 / world_size) * world_size


# In the ranks --------------------------------------------------------------------------------------------


def work(case: HierarchyCase, out: Path, *, quick: bool) -> None:
    """Measure the case as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    # Collectives alone: what computing costs takes most of a probe of 16 ranks on two cores.
    links = probe_cluster(busy_cores=False, effort=replace(EFFORT, candidates=()))
    effort = replace(EFFORT, shares_bytes=QUICK_SHARES_BYTES) if quick else EFFORT
    measured = timings_of(links, busy_cores=False, effort=effort)
    hosts = Hosts.of_cluster(links)
    actions = {
        f"{method} {size}": _action(method, _numel(size, group.size()), hosts, group)
        for size in case.sizes_mb
        for method in _methods(links, 4 * _numel(size, group.size()), quick=quick)
    }
    times_s: dict[str, list[float]] = {name: [] for name in actions}
    begun, used = time.perf_counter(), time.process_time()
    for turn in range(1 + (5 if quick else 15)):
        for name, action in actions.items():
            took = _timed(action)
            if turn:  # the first round warms connections
                times_s[name].append(took)
    share = torch.tensor((time.process_time() - used) / (time.perf_counter() - begun), dtype=torch.float64)
    dist.all_reduce(share)
    if dist.get_rank() == 0:
        cpu = float(share) / (links.shared_cores or 1)
        cluster = fitted(links, measured, effort)  # here alone: all ranks share the cores that it takes
        found = {"cluster": cluster.model_dump(mode="json"), "times_s": times_s, "cpu": cpu}
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _action(method: str, numel: int, hosts: Hosts, group: dist.ProcessGroup) -> Callable[[], None]:
    selections = _selections(method, numel * 4, hosts)
    needed = [each.scratch_numel(numel, group.size()) for each in selections]
    flat, scratch = torch.ones(numel), torch.empty(max(needed))
    return partial(_in_turn, [prepare(each, flat, group, scratch) for each in selections])


def _in_turn(runs: list[Any]) -> None:
    for run in runs:
        run()


def _timed(action: Callable[[], None]) -> float:
    """Seconds from when all ranks begin, after a pause, until the slowest is done."""
    dist.barrier()
    time.sleep(0.05)
    dist.barrier()
    begun = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    if WORKER in sys.argv:
        work(CASES[sys.argv[2]], Path(sys.argv[4]), quick=bool(int(sys.argv[3])))
    else:
        main()
