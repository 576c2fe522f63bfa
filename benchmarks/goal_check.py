"""Another simulator's word on the same graphs: LogGOPSim plays what Headway exports as GOAL, and both say when it ends.

    HEADWAY_LOGGOPSIM=FOLDER python benchmarks/goal_check.py [--quick] [--only CASE] [--json FILE]

FOLDER holds `txt2bin` and `LogGOPSim`, built from ATLAHS (its sim/LogGOPSim, with re2c and gengetopt). The original
LogGOPSim lets an operation of another processor begin when what it requires begins, not when that is done, and so is
too fast for every graph in which communication overlaps computation. Each case is a published model, trained for
two steps by ranks that compute for times of their own, under plans of every strategy: once where messages take no time,
where both must say the same, and once where links have a latency and a rate, for which both have models of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import parse_arguments, report

from headway.cluster import Cluster, Host
from headway.graph.build import GraphBuilder
from headway.graph.goal import GoalWriter
from headway.graph.step_layout import lay_out_ranks
from headway.job import Job
from headway.prediction.models import workload_named
from headway.prediction.strategies import strategies_named
from headway.simulation.building import OperationGraph
from headway.simulation.engine import play
from headway.strategies.registry import plugin_of

MODELS = ("resnet50", "bert-base", "vgg16")
PLANS = ("ddp", "decoupled:gather=parameters", "decoupled:gather=gradients", "parameter_server")
WORKERS, STEPS = 8, 2
LARGE, LARGE_WORKERS, LARGE_PLAN = "64-ranks", 64, "decoupled:gather=parameters"
UNEVEN = 0.003  # by so much more computes a rank than the one before
QUEUED_BYTES = 2**31 - 1  # messages up to this size are sent before anybody waits for them


class Links(NamedTuple):
    """What messages cost: ours as a cluster has it, and LogGOPSim's G (ns a byte)."""

    name: str
    gbps: float
    latency_us: float
    byte_ns: float


FREE = Links("free", 1e6, 0, 0.0)
TEN_GBPS = Links("10gbps", 10, 20, 0.8)
WORDS = (
    "The end of the last rank (`headway_ms`, `loggopsim_ms`) after two steps of a model, by Headway's engine and by "
    "LogGOPSim as ATLAHS has it, of the same graph. `off_ns` is the largest difference of any rank's end (of 64 ranks: "
    "that of the last), `error` that of the last. Links are `free` where messages cost nothing in LogGOPSim and take "
    "a million Gb/s in Headway, which is some microseconds for all of them. With links of 10 Gb/s and 20 us each has a "
    "model of its own: Headway has connections share a link at max-min fair rates, LogGOPSim lets messages pass one "
    "after the other. Which of its rules makes LogGOPSim take so much longer over some plans is not known; how near "
    "Headway's model is to real links, replay_accuracy says. `time_ms` is playing alone (`headway`), and the whole "
    "process after the text was made binary (`loggopsim`)."
)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", [*MODELS, LARGE])
    folder = Path(os.environ.get("HEADWAY_LOGGOPSIM", "nowhere")).absolute()
    missing = [name for name in ("txt2bin", "LogGOPSim") if not os.access(folder / name, os.X_OK)]
    if missing:
        raise SystemExit(f"HEADWAY_LOGGOPSIM={folder}: there is no {' and no '.join(missing)}. {__doc__}")
    # One that is large enough to be compiled: all from then on are.
    play(_laid_out(MODELS[0], PLANS[1], FREE, 2 * WORKERS)[1])
    chosen = [arguments.only] if arguments.only else [*MODELS[: 1 if arguments.quick else None], LARGE]
    rows: list[dict[str, Any]] = []
    for case in chosen:
        for plan in PLANS if case in MODELS else (LARGE_PLAN,):
            for links in (FREE, TEN_GBPS) if case in MODELS else (FREE,):
                print(f"{case} {plan} {links.name} …", file=sys.stderr, flush=True)
                rows += _compared(folder, case, plan, links)
    report("goal_check", rows, arguments, WORDS)


def _compared(folder: Path, case: str, plan: str, links: Links) -> list[dict[str, Any]]:
    large = case == LARGE
    graph, dataflow = _laid_out(
        MODELS[0] if large else case, plan, links, LARGE_WORKERS if large else WORKERS
    )
    begun = time.perf_counter()
    played = play(dataflow)
    ours_s = time.perf_counter() - begun
    writer = GoalWriter(graph, dataflow)
    ends_ns = np.array([played.end_ns[writer.ranks == rank].max() for rank in range(graph.world_size)])
    with tempfile.TemporaryDirectory() as name:
        text_file, binary = Path(name) / "graph.goal", Path(name) / "graph.bin"
        operations = writer.write(text_file)
        subprocess.run([folder / "txt2bin", "-i", text_file, "-o", binary], check=True, capture_output=True)
        begun = time.perf_counter()
        theirs_ns, last_ns = _played(folder, binary, links)
        theirs_s = time.perf_counter() - begun
    off_ns = int(np.abs(ends_ns - theirs_ns).max()) if len(theirs_ns) else abs(int(ends_ns.max()) - last_ns)
    shared = {
        "case": case, "plan": plan, "links": links.name, "headway_ms": float(ends_ns.max() / 1e6),
        "loggopsim_ms": last_ns / 1e6, "off_ns": off_ns, "error": float(ends_ns.max() / last_ns - 1),
        "operations": operations,
    }  # fmt: skip
    return [
        {**shared, "method": method, "time_ms": 1e3 * took_s, "operations_per_s": round(operations / took_s)}
        for method, took_s in (("headway", ours_s), ("loggopsim", theirs_s))
    ]


def _laid_out(model: str, plan: str, links: Links, workers: int) -> tuple[GraphBuilder[Any], OperationGraph]:
    hosts = tuple(
        Host(name=f"h{rank}", workers=1, up_gbps=links.gbps, down_gbps=links.gbps) for rank in range(workers)
    )
    cluster = Cluster(hosts=hosts, latency_us=links.latency_us)
    workload = workload_named(model, None, "momentum")
    strategy = strategies_named((plan,), workload)[plan]
    graph = GraphBuilder(cluster, strategy.decide(Job.of(workload.spec)))
    ranks = [
        [workload.timeline(rank, step).scaled(1 + UNEVEN * rank) for step in range(STEPS)]
        for rank in range(workers)
    ]
    layout = plugin_of(strategy).reactions(graph, Job.of(workload.spec), strategy)
    lay_out_ranks(graph, layout, ranks)
    return graph, graph.close()


def _played(folder: Path, binary: Path, links: Links) -> tuple[np.ndarray, int]:
    """Every rank's end, where LogGOPSim says it (of up to 16), and the last one's."""
    command = [
        str(folder / "LogGOPSim"), "-f", str(binary), "-L", str(round(links.latency_us * 1e3)),
        "-o", "0", "-g", "0", "-O", "0", "-G", str(links.byte_ns), "-S", str(QUEUED_BYTES),
    ]  # fmt: skip
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ends = [int(found) for found in re.findall(r"^Host \d+: (\d+)$", said, re.MULTILINE)]
    if ends:
        return np.array(ends), max(ends)
    (last,) = re.findall(r"^Maximum finishing time at host \d+: (\d+) ", said, re.MULTILINE)
    return np.zeros(0), int(last)


if __name__ == "__main__":
    main()
