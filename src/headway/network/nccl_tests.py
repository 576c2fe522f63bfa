"""Fits NCCL fabrics and clusters to logs of nccl-tests and to traces.

NCCL's collectives are fitted with NCCL's own model, RCCL's as rings: RCCL's public constants (ROCm/rccl,
src/graph/tuning.cc) only serve its choice of algorithms and do not predict times.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import fmean, median
from typing import cast

import numpy as np

from headway.cluster import HOST_COSTS, AlgorithmCost, Cluster, Host, NcclModel
from headway.collectives.algorithms import ALL_GATHER, ALL_REDUCE, KINDS, NCCL, REDUCE_SCATTER, cost_name
from headway.collectives.nccl import NETWORK_US, Architecture, Fabric, Kind, channels_of, choose
from headway.errors import UserError
from headway.trace.events import Event
from headway.trace.events import Kind as EventKind
from headway.trace.format import Trace

MAX_LOG_BYTES = 64 * 2**20
LEAST_BYTES = 2**20  # smaller rows are ignored by the fit
LARGE_BYTES = 2**26  # rows from this size on determine rates
REACHED = (0.5, 1.1)  # range of the reached share of a card's speed; below it, NCCL assumes a slower card
FACTORS = (0.5, 3.0)  # range of latency factors
_COST_NAMES = tuple(cost_name(NCCL, kind) for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER))
COVERED = 0.85  # share of rows within the stated uncertainty
UNSEEN = 0.1  # least error for more hosts than in the logs
SLOW = 0.85  # hosts below this share of the usual bandwidth are reported
INSIDE_GB_S = {
    "volta": 120.0,
    "ampere": 235.0,
    "hopper": 320.0,
    "blackwell": 640.0,
}  # defaults without a log of a single host
CARD_SPEEDS = (96.0, 48.0, 24.0, 12.0, 6.0, 3.0)  # in GB/s, the speeds that NCCL distinguishes
_NAMED = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
_PREFIX = re.compile(r"\[\d+,\d+\]<std(?:out|err)>: ?")  # of mpirun's --tag-output
_TEST = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce|gather|scatter)_perf"
)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*)$")
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[\w.]+\s+(\w+)\s+(?:-?\d+\s+)?([\d.e+]+)\s+([\d.e+]+)\s+([\d.e+]+)\s")
_AMD = re.compile(r"\b(?:AMD|Instinct|Radeon|gfx\d+)", re.IGNORECASE)
_OF_RCCL = re.compile(r"rccl-tests|RCCL version|librccl", re.IGNORECASE)
_ARCHITECTURES = (
    ("B200", "blackwell"), ("B300", "blackwell"), ("B100", "blackwell"), ("H100", "hopper"), ("H200", "hopper"),
    ("H800", "hopper"), ("H20", "hopper"), ("GH200", "hopper"), ("A100", "ampere"), ("A800", "ampere"),
    ("A10", "ampere"), ("A40", "ampere"), ("V100", "volta"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timing:
    """One row of a log: a collective over ``ranks`` on ``hosts``; ``size_bytes`` is the full tensor's."""

    kind: Kind
    size_bytes: int
    time_us: float
    ranks: int
    hosts: int
    device: str = ""

    @property
    def architecture(self) -> str:
        """The GPU architecture by the device's name; "" if unknown."""
        return architecture_of(self.device)


def architecture_of(device: str) -> str:
    """The GPU architecture by the device's name; "" if unknown."""
    return next((kind for part, kind in _ARCHITECTURES if part in device.upper()), "")


def is_amd(device: str) -> bool:
    """Whether the device is an AMD GPU, which uses RCCL."""
    return _AMD.search(device) is not None


def read_log(text: str, name: str = "the log") -> list[Timing]:
    """Parse a log's rows of all-reduce, all-gather and reduce-scatter.

    Raises UserError if the log has no rows, or if hosts have different numbers of ranks.
    """
    rows: list[Timing] = []
    test = ""
    hosts: dict[str, set[int]] = {}
    device = ""
    seen = False
    for raw in text.splitlines():
        line = _PREFIX.sub("", raw)
        if match := _RANK.match(line):
            if int(match[1]) == 0:
                hosts = {}
            hosts.setdefault(match[2], set()).add(int(match[1]))
            device = match[4][:80]
        elif line.startswith("#") or "_perf" in line:
            test = named[1] if (named := _TEST.search(line)) else test
        elif match := _ROW.match(line):
            seen = True
            ranks = sum(map(len, hosts.values()))
            kind = _kind(test, match[2], float(match[4]), float(match[5]), ranks)
            if kind and ranks > 1 and int(match[1]):
                if len({len(host) for host in hosts.values()}) > 1:
                    raise UserError(
                        f"{name}: hosts have different numbers of ranks", got=", ".join(sorted(hosts)[:4]),
                        expected="equally many ranks on each host",
                    )  # fmt: skip
                rows.append(Timing(kind, int(match[1]), float(match[3]), ranks, len(hosts), device))
    if not seen:
        raise UserError(
            f"{name} is not a log of nccl-tests",
            expected="rows of size, count, type, redop, time, algbw, busbw",
        )
    return rows


def _kind(test: str, operation: str, algorithm_gb_s: float, bus_gb_s: float, ranks: int) -> Kind | None:
    """The collective of a row: by the test's name, else by the ratio of its two bandwidths and its operation."""
    if test:
        return cast("Kind | None", _NAMED.get(test))
    if ranks < 2 or not algorithm_gb_s:
        return None
    if abs(bus_gb_s / algorithm_gb_s - 2 * (ranks - 1) / ranks) < 0.1 and operation != "none":
        return "all_reduce"
    return None


def errors(rows: Iterable[Timing], fabric: Fabric, cards_gb_s: float = 0.0) -> list[float]:
    """The relative error of the model for each row; 0.1 means that it predicts a time 10% too long.

    With ``cards_gb_s``, each rank has its own card of that rate.
    """
    return [predicted_us(row, fabric, cards_gb_s) / row.time_us - 1 for row in rows]


def predicted_us(row: Timing, fabric: Fabric, cards_gb_s: float = 0.0) -> float:
    """The model's time for a row."""
    a_host = row.ranks // row.hosts
    if cards_gb_s:
        fabric = replace(fabric, outside_gb_s=cards_gb_s * a_host, channels=channels_of(a_host))
    return choose(row.kind, row.size_bytes, row.ranks, row.hosts, fabric).time_us


def fitted(rows: Sequence[Timing], fabric: Fabric) -> tuple[Fabric, float]:
    """Fit the fabric, and the speed of each rank's card, to the ``rows`` of several hosts.

    NCCL classifies cards into a few speeds, of which only a share is reached. Minimizes the mean error over both.
    """
    several = _of_several_hosts(rows)
    large = [row for row in several if row.size_bytes >= LARGE_BYTES] or several
    roughly = [(reaching(large, fabric, speed), speed) for speed in CARD_SPEEDS]
    roughly.sort(key=lambda candidate: mean_off(several, *candidate))
    candidates = [(_fitted_to(several, *candidate), candidate[1]) for candidate in roughly[:2]]
    return min(candidates, key=lambda candidate: mean_off(several, *candidate))


def _of_several_hosts(rows: Sequence[Timing]) -> list[Timing]:
    several = [row for row in rows if row.hosts > 1 and row.size_bytes >= LEAST_BYTES]
    if not several:
        raise UserError(
            "the logs have no row for several hosts",
            got=f"{len(rows)} rows",
            expected="sizes from 1 MiB on, over two or more hosts",
        )
    return several


def _fitted_to(rows: Sequence[Timing], fabric: Fabric, speed: float) -> Fabric:
    for _ in range(3):
        for name, bounds in (("tree_factor", FACTORS), ("network_factor", FACTORS), ("reached", REACHED)):
            before = mean_off(rows, fabric, speed)

            def cost(value: float, name: str = name, fabric: Fabric = fabric) -> float:
                return mean_off(rows, replace(fabric, **{name: value}), speed)  # type: ignore[arg-type]

            value = best_factor(cost, *bounds)
            if cost(value) < before:
                fabric = replace(fabric, **{name: value})  # type: ignore[arg-type]
    return fabric


def reaching(rows: Sequence[Timing], fabric: Fabric, speed: float) -> Fabric:
    """``fabric`` with the reached share of ``speed`` that fits ``rows`` best."""
    share = best_factor(lambda value: off(rows, replace(fabric, reached=value), speed), *REACHED)
    return replace(fabric, reached=share)


def off(rows: Sequence[Timing], fabric: Fabric, speed: float) -> float:
    """The median relative error of the model."""
    return median(abs(error) for error in errors(rows, fabric, speed))


def mean_off(rows: Sequence[Timing], fabric: Fabric, speed: float) -> float:
    """The mean absolute log error of the model."""
    return fmean(abs(math.log1p(error)) for error in errors(rows, fabric, speed))


def stated_error(rows: Sequence[Timing], fabric: Fabric, speed: float) -> float:
    """The relative uncertainty of collectives on a cluster fitted to ``rows``."""
    several = [row for row in rows if row.hosts > 1 and row.size_bytes >= LEAST_BYTES]
    far = sorted(map(abs, errors(several, fabric, speed)))
    return max(UNSEEN, far[int(COVERED * (len(far) - 1))])


def best_factor(cost: Callable[[float], float], low: float, high: float) -> float:
    """The minimizer of ``cost`` between two positive values, by a geometric grid that gets finer."""
    best, width = math.sqrt(low * high), high / low
    for _ in range(4):
        tries = [best * width ** (step / 12 - 0.5) for step in range(13)]
        best = min((value for value in tries if low <= value <= high * 1.001), key=cost)
        width **= 0.25
    return best


def cluster_of(logs: Sequence[tuple[str, str]]) -> tuple[Cluster, str]:
    """Fit a cluster to logs (name, text); also returns a description of the fit's error.

    The cluster has the hosts and workers of the largest run. Raises UserError as ``read_log`` and ``fitted`` do.
    """
    read = [(name, read_log(text, name), _version_in(text)) for name, text in logs]
    rows = [row for _, log_rows, _ in read for row in log_rows]
    largest = max(rows, key=lambda row: (row.hosts, row.ranks), default=None)
    if largest is None:
        raise UserError(
            "the logs have no all-reduce, all-gather or reduce-scatter with several ranks",
            got=", ".join(n for n, _ in logs),
        )
    names = ", ".join(PurePath(name).name for name, _ in logs[:4]) + (" and more" if len(logs) > 4 else "")
    if any(is_amd(row.device) for row in rows) or any(_OF_RCCL.search(text) for _, text in logs):
        return _cluster_of_rings(rows, largest, names)
    architecture = cast("Architecture", largest.architecture or "hopper")
    version = max(version for _, _, version in read)
    # Leave out all-reduce: switches that reduce (NVLS) make it faster than a GPU's links.
    gathers = [row for row in rows if row.kind != "all_reduce"]
    inside_gb_s = _inside_gb_s(gathers, INSIDE_GB_S[architecture])
    several = _of_several_hosts(rows)
    tried = []
    for cpu in ("intel", "amd"):
        nvls = architecture in ("hopper", "blackwell")
        fabric = Fabric(architecture, cpu, inside_gb_s, version=version, nvls=nvls, passing_gb_s=inside_gb_s)
        candidate_fabric, speed = fitted(rows, fabric)
        tried.append((mean_off(several, candidate_fabric, speed), candidate_fabric, speed))
    _, candidate_fabric, speed = min(tried, key=lambda candidate: candidate[0])
    far = sorted(map(abs, errors(several, candidate_fabric, speed)))
    error = stated_error(rows, candidate_fabric, speed)
    a_host = max(row.ranks // row.hosts for row in rows)
    link_gbps = speed * candidate_fabric.reached * a_host * 8
    words = f"NCCL's model is {_how_far(far)}"
    cluster = Cluster(
        hosts=_hosts(largest.hosts, a_host, link_gbps),
        latency_us=NETWORK_US * candidate_fabric.network_factor,
        local_gbps=inside_gb_s * 8,
        local_latency_us=3.4,
        algorithms={name: AlgorithmCost(fit_error=error) for name in _COST_NAMES},
        library="nccl",
        nccl=NcclModel(
            architecture=architecture,
            cpu=candidate_fabric.cpu,
            inside_gb_s=inside_gb_s,
            cards_gb_s=speed,
            network_factor=candidate_fabric.network_factor,
            tree_factor=candidate_fabric.tree_factor,
            nvls=candidate_fabric.nvls,
            version=version,
        ),
        source=f"logs of nccl-tests ({names}): NCCL's own model, {_how_far(far)}",
    )
    return cluster, words


def _hosts(count: int, workers: int, gbps: float) -> tuple[Host, ...]:
    return tuple(Host(name=f"host{at}", workers=workers, up_gbps=gbps, down_gbps=gbps) for at in range(count))


def _inside_gb_s(rows: Iterable[Timing], default: float) -> float:
    """The bus bandwidth that large collectives inside a host reach."""
    inside = (row for row in rows if row.hosts == 1 and row.size_bytes >= LARGE_BYTES)
    return max(map(_bus_gb_s, inside), default=default)


def _how_far(far: Sequence[float]) -> str:
    """Describes sorted relative errors."""
    tail = far[int(0.9 * (len(far) - 1))]
    return f"off by {median(far):.1%} (median of {len(far)} rows); a tenth of the rows are off by {tail:.0%} or more"


def _cluster_of_rings(rows: Sequence[Timing], largest: Timing, names: str) -> tuple[Cluster, str]:
    """Fit rings to ``rows``: a link rate, a latency between hosts, and an overhead per collective."""
    several = _of_several_hosts(rows)
    took_us = np.array([row.time_us for row in several])
    steps = np.array([(2 if row.kind == "all_reduce" else 1) * (row.ranks - 1) for row in several])
    sizes, ranks, hosts = (
        np.array([getattr(row, name) for row in several]) for name in ("size_bytes", "ranks", "hosts")
    )
    # Columns: overhead, steps of a ring between hosts, bytes per link.
    terms = np.stack([np.ones(len(several)), steps * hosts / ranks, steps * sizes / ranks], axis=1)
    several_counts = len(set(hosts.tolist())) > 1
    best, far = np.array([0.0, 0.0, 1e-3]), np.full(len(several), np.inf)
    for used in ([0, 1, 2], [1, 2], [0, 2], [2]):
        if used == [0, 1, 2] and not several_counts:
            continue
        solution = np.zeros(3)
        solution[used] = np.linalg.lstsq(
            terms[:, used] / took_us[:, None], np.ones(len(several)), rcond=None
        )[0]
        off_by = np.abs(terms @ solution / took_us - 1)
        if solution.min() >= 0 and solution[2] > 0 and off_by.mean() < far.mean():
            best, far = solution, off_by
    overhead_us, latency_us, us_a_byte = map(float, best)
    if not overhead_us + latency_us:  # large tensors do not reveal the latency
        latency_us = NETWORK_US
    link_gbps = 8e-3 / us_a_byte
    far_off = sorted(map(float, far))
    error = max(UNSEEN, far_off[int(COVERED * (len(far_off) - 1))])
    cluster = Cluster(
        hosts=_hosts(largest.hosts, max(row.ranks // row.hosts for row in rows), link_gbps),
        latency_us=latency_us,
        local_gbps=max(_inside_gb_s(rows, 0.0) * 8, link_gbps),
        local_latency_us=0.0,
        algorithms={name: AlgorithmCost(overhead_us=overhead_us, fit_error=error) for name in _COST_NAMES},
        library="nccl",
        source=f"logs of rccl-tests ({names}): rings, {_how_far(far_off)}",
    )
    return cluster, f"rings are {_how_far(far_off)}"


def _bus_gb_s(row: Timing) -> float:
    share = (2 if row.kind == "all_reduce" else 1) * (row.ranks - 1) / row.ranks
    return row.size_bytes * share / row.time_us / 1e3


def _version_in(text: str) -> tuple[int, int]:
    """NCCL's version from the log, or a common one if the log does not state it."""
    match = re.search(r"nccl-library=(\d+)", text)
    number = int(match[1]) if match else 22700
    return number // 10_000, number // 100 % 100


def slow_hosts(texts: Iterable[str]) -> dict[str, float]:
    """Hosts with low bandwidth in runs of two hosts, with their share of the usual bandwidth."""
    of_host: dict[str, list[float]] = {}
    for text in texts:
        hosts = {match[2] for line in text.splitlines() if (match := _RANK.match(_PREFIX.sub("", line)))}
        if len(hosts) == 2 and (average := re.search(r"Avg bus bandwidth\s*:\s*([\d.]+)", text)):
            for host in hosts:
                of_host.setdefault(host, []).append(float(average[1]))
    middle = {host: median(bandwidths) for host, bandwidths in of_host.items() if len(bandwidths) > 1}
    usual = median(middle.values()) if len(middle) > 2 else 0.0
    return {
        host: bandwidths / usual
        for host, bandwidths in sorted(middle.items())
        if usual and bandwidths < SLOW * usual
    }


LEAST_ROWS = 4
SLACK = 0.02  # by how much the model's error may exceed that of rings


def with_nccl(trace: Trace, flat: Cluster, flat_error: float) -> Cluster:
    """``flat``, the ring cluster fitted to ``trace``, with NCCL's model if that fits equally well.

    ``flat_error`` is the median relative error of the rings. Rings alone make predictions for more hosts far too slow,
    because NCCL switches to trees. A single number of ranks does not reveal latencies, so NCCL's own are used.
    """
    rows = timings_of(trace, flat)
    workers = {host.workers for host in flat.hosts}
    device = trace.manifest.ranks[0].device
    if len(rows) < LEAST_ROWS or len(workers) > 1 or is_amd(device):
        return flat
    architecture = cast("Architecture", architecture_of(device) or "hopper")
    inside_gb_s = INSIDE_GB_S[architecture]
    fabric = Fabric(architecture, "intel", inside_gb_s, version=(2, 27), passing_gb_s=inside_gb_s)
    if len(flat.hosts) == 1:
        inside = best_factor(lambda value: off(rows, _inside(fabric, value), 0.0), 1.0, 1000.0)
        best, speed = _inside(fabric, inside), 0.0
    else:
        fitted = {card: reaching(rows, fabric, card) for card in CARD_SPEEDS}
        speed = min(fitted, key=lambda card: off(rows, fitted[card], card))
        best = fitted[speed]
    error = off(rows, best, speed)
    if error > flat_error + SLACK:
        return flat
    (a_host,) = workers
    gbps = speed * best.reached * a_host * 8 if speed else flat.hosts[0].up_gbps
    source = (
        f"fitted from the trace with NCCL's own model, with a median error of {error:.1%} for its collectives"
    )
    costs = {
        name: cost if name in HOST_COSTS else AlgorithmCost(fit_error=error)
        for name, cost in flat.algorithms.items()
    }
    return flat.model_copy(
        update={
            "hosts": tuple(host.model_copy(update={"up_gbps": gbps, "down_gbps": gbps}) for host in flat.hosts),
            "local_gbps": best.inside_gb_s * 8,
            "algorithms": costs,
            "nccl": NcclModel(
                architecture=architecture, inside_gb_s=best.inside_gb_s, cards_gb_s=speed or CARD_SPEEDS[1]
            ),
            "source": source,
        }
    )  # fmt: skip


def _inside(fabric: Fabric, inside_gb_s: float) -> Fabric:
    return replace(fabric, inside_gb_s=inside_gb_s, passing_gb_s=inside_gb_s)


def timings_of(trace: Trace, cluster: Cluster) -> list[Timing]:
    """The time of each collective of all ranks with a known size, from the arrival of the last rank."""
    instances: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for events in trace.events.values():
        for row in events.of_kind(EventKind.COLLECTIVE):
            if row.name in KINDS and row.size_bytes > 0 and row.sequence >= 0:
                instances[row.name, row.group, row.sequence].append(row)
    device = trace.manifest.ranks[0].device
    timings = []
    for (name, group, _), rows in instances.items():
        if len(rows) == len(trace.events) == trace.world_size == len(trace.members(group)):
            took_ns = max(row.end_ns for row in rows) - max(row.start_ns for row in rows)
            if took_ns > 0:
                size_bytes = max(row.size_bytes for row in rows)
                timings.append(
                    Timing(
                        cast("Kind", name),
                        size_bytes,
                        took_ns / 1e3,
                        trace.world_size,
                        len(cluster.hosts),
                        device,
                    )
                )
    return timings
