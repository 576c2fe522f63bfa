"""How fast a graph is built and played: operations a second, and memory an operation.

    python benchmarks/replay_speed.py [--quick] [--only CASE] [--json FILE]

Each case is one step of data-parallel training as replay sees it: a backward that readies tensors one after the other
on every rank, and a ring all-reduce of each on one of two channels, which share the links (1 Gb/s, 20 us). Every
message is two operations, its sending and its receipt. Ranks compute for times of their own, so that nothing is alike.
`one-changed` is the first case with tensors of different sizes, built once (`first_build_s`) and then again with
another size for one of them (`build_s`). `folded` cases are a whole answer, as `headway predict` gives it: ResNet-50
under DDP on alike hosts of eight workers, of which one host is played for all. Each measurement is a new process;
compiling happened before.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from common import parse_arguments, report

# Ranks and tensors.
CASES = {
    "64-ranks-100-tensors": (64, 100),
    "1e5-operations": (16, 104),
    "1e6-operations": (64, 62),
    "1e7-operations": (128, 154),
    "1e8-operations": (512, 95),
    "1024-ranks-5-tensors": (1024, 5),
}
CHANGED = {"64-ranks-100-tensors-one-changed": (64, 100)}
FOLDED = {"1024-ranks-folded": 1024, "16384-ranks-folded": 16_384}
QUICK = ("64-ranks-100-tensors", *CHANGED, "1e5-operations", "1e6-operations", "1e7-operations", *FOLDED)
CHANNELS = 2
TENSOR_BYTES = 1_000_000
WORKER, CHANGER, PREDICTOR = "--measure", "--change", "--predict"


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        print(json.dumps(_measure(int(sys.argv[2]), int(sys.argv[3]))))
        return
    if sys.argv[1:2] == [CHANGER]:
        print(json.dumps(_measure(int(sys.argv[2]), int(sys.argv[3]), change=True)))
        return
    if sys.argv[1:2] == [PREDICTOR]:
        print(json.dumps(_predict(int(sys.argv[2]))))
        return
    every = [*CASES, *CHANGED, *FOLDED]
    arguments = parse_arguments(__doc__ or "", every)
    chosen = [arguments.only] if arguments.only else list(QUICK if arguments.quick else every)
    _run(WORKER, 4, 40)  # compiles, where that has not been kept from before
    rows = []
    for case in chosen:
        if case in FOLDED:
            rows.append(_row(case, [_run(PREDICTOR, FOLDED[case]) for _ in range(3)]))
            continue
        if case in CHANGED:
            rows.append(_row(case, [_run(CHANGER, *CHANGED[case]) for _ in range(3)]))
            continue
        rounds = 1 if CASES[case][0] * CASES[case][1] > 40_000 else 3 if arguments.quick else 5
        rows.append(_row(case, [_run(WORKER, *CASES[case]) for _ in range(rounds)]))
    words = (
        "One step of data-parallel training over a ring, as replay plays it: `time_ms` is playing alone, the median of "
        "several processes; `load_s` is loading what was compiled, `build_s` laying out the graph, `total_s` all "
        "three, from the tensors to the answer. `bound_ms` is reading and writing every operation of the graph once. "
        "Links are shared by two channels."
    )
    report("replay_speed", rows, arguments, words)


def _row(case: str, said: list[dict[str, Any]]) -> dict[str, Any]:
    taken = [1e3 * one["play_s"] for one in said]
    time_ms, bound_ms = statistics.median(taken), 1e3 * min(one["touch_s"] for one in said)
    operations = said[0]["operations"]
    return {
        "case": case,
        "method": "headway",
        "time_ms": time_ms,
        "bound_ms": bound_ms,
        "ratio": time_ms / bound_ms,
        "least_ms": min(taken),
        "most_ms": max(taken),
        "operations": operations,
        "operations_per_s": round(operations / time_ms * 1e3),
        "load_s": statistics.median(one["load_s"] for one in said),
        "build_s": statistics.median(one["build_s"] for one in said),
        "first_build_s": statistics.median(one["first_build_s"] for one in said),
        "total_s": statistics.median(one["total_s"] for one in said),
        "bytes_per_operation": round(said[0]["graph_bytes"] / operations, 1),
        "peak_gb": max(one["peak_gb"] for one in said),
    }


def _run(what: str, *numbers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, what, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{numbers}: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _predict(ranks: int) -> dict[str, Any]:
    begin = time.perf_counter()
    from headway.prediction.clusters import cluster_named
    from headway.prediction.models import workload_named
    from headway.simulator.simulate import Simulator
    from headway.strategies.ddp.policy import DistributedDataParallelStrategy

    workload = workload_named("resnet50", "a100", "momentum")
    cluster = cluster_named("hdr-200g-nvlink").resized(ranks)
    loaded = time.perf_counter()
    _, graph = Simulator().lay_out(workload.job(cluster), DistributedDataParallelStrategy(), fold=True)
    return _played(graph, begin, loaded)


def _measure(ranks: int, tensors: int, *, change: bool = False) -> dict[str, Any]:
    from headway.cluster import Cluster, Host
    from headway.collectives.resources import ClusterResources
    from headway.simulation.building import OperationGraphBuilder
    from headway.simulation.engine import play, simulate_for

    begin = time.perf_counter()
    simulate_for(10**9)  # whatever the size: compiled
    small = OperationGraphBuilder(1)
    small.operation(1, sender=0)
    play(small.close())
    loaded = time.perf_counter()
    hosts = tuple(Host(name=f"host{rank}", workers=1, up_gbps=1, down_gbps=1) for rank in range(ranks))
    resources = ClusterResources(Cluster(hosts=hosts, latency_us=20))
    random = np.random.default_rng(0)
    compute_ns = random.integers(1_000_000, 5_000_000, size=(tensors, ranks)).tolist()
    sizes_bytes = [TENSOR_BYTES] * tensors
    if not change:
        return _played(_built(resources, compute_ns, sizes_bytes), begin, loaded)
    sizes_bytes = random.integers(TENSOR_BYTES // 2, TENSOR_BYTES * 3 // 2, size=tensors).tolist()
    _built(resources, compute_ns, sizes_bytes)
    first_build_s = time.perf_counter() - loaded
    sizes_bytes[tensors // 2] += 4096
    changed = time.perf_counter()
    said = _played(_built(resources, compute_ns, sizes_bytes), changed, changed)
    return {**said, "first_build_s": first_build_s}


def _built(resources: Any, compute_ns: list[list[int]], sizes_bytes: list[int]) -> Any:
    """The graph of a step in which every rank readies tensors of ``sizes_bytes``, after so much computation each."""
    from headway.collectives.algorithms import ALL_REDUCE, RING, program_of
    from headway.collectives.dataflow import expand

    builder = resources.builder()
    ranks = range(resources.world_size)
    tails = [builder.operation() for _ in ranks]
    for tensor, size_bytes in enumerate(sizes_bytes):
        tails = [builder.operation(compute_ns[tensor][rank], after=[tails[rank]]) for rank in ranks]
        ends = [builder.operation() for _ in ranks]
        expand(
            builder,
            resources,
            program_of(RING, ALL_REDUCE),
            size_bytes,
            tails,
            ends,
            connection=tensor % CHANNELS,
        )
    return builder.close()


def _played(graph: Any, begin: float, loaded: float) -> dict[str, Any]:
    """Play a graph that has just been built, and say what all took."""
    from headway.simulation.engine import play

    built = time.perf_counter()
    schedule = play(graph)
    played = time.perf_counter()
    graph.wide.copy()
    moments = (begin, loaded, built, played, time.perf_counter())
    load_s, build_s, play_s, touch_s = np.diff(moments).tolist()
    return {
        "operations": len(graph),
        "load_s": load_s,
        "build_s": build_s,
        "first_build_s": build_s,
        "play_s": play_s,
        "total_s": load_s + build_s + play_s,
        "touch_s": touch_s,
        "graph_bytes": graph.memory_bytes + schedule.start_ns.nbytes + schedule.end_ns.nbytes,
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }


if __name__ == "__main__":
    main()
