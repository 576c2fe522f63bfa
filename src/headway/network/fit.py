"""Fits a cluster from a trace: link rates and the overhead of collectives, from recorded communication."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.cluster import BACKGROUND_UPDATE, DEFERRED_UPDATE, STEP_CALL, AlgorithmCost, Cluster, Host
from headway.collectives.algorithms import ALGORITHMS, NATIVE, NCCL, OF_LIBRARIES, cost_name, sent_bytes
from headway.collectives.hierarchical import Hosts
from headway.errors import TraceError
from headway.graph.recorded import both_ends
from headway.graph.step_layout import background_update_cost, is_background
from headway.intervals import Intervals
from headway.trace.events import Event, Kind
from headway.trace.format import Trace

UNEQUAL = 1.1  # ratio of the fastest to the slowest rate from which links count as unequal
MOST_STRIDES = 3


def link_rates(measured: Callable[[int], Sequence[float]]) -> tuple[list[float], list[float]]:
    """The rate of each place's link up and down. ``measured(stride)`` lets every place send ``stride`` places on at once.

    Measures a stride of 1, and larger ones if rates differ.
    """
    rates = {1: measured(1)}
    places = len(rates[1])
    if places > 2 and max(rates[1]) > min(rates[1]) * UNEQUAL:
        for stride in range(2, min(places, MOST_STRIDES + 1)):
            rates[stride] = measured(stride)
    return attributed(rates)


def attributed(rates: Mapping[int, Sequence[float]]) -> tuple[list[float], list[float]]:
    """Link rates up and down, if place ``i`` sent to place ``i + stride`` at ``rates[stride][i]``."""
    places = range(len(rates[1]))
    up = [max(rate[place] for rate in rates.values()) for place in places]
    down = [max(stride_rates[place - stride] for stride, stride_rates in rates.items()) for place in places]
    return up, down


SHORT_WAIT_NS = 100_000  # shorter waits are for messages that had arrived before
OF_THE_FASTEST = 0.1  # quantile of a pair's fastest messages; slow ones may have been noticed late


class Rates(NamedTuple):
    """Message rates out of, into and within hosts, in Gbit/s; hosts without messages are left out."""

    up: dict[str, float]
    down: dict[str, float]
    local: float | None


def message_rates(trace: Trace, latency_us: float) -> Rates | None:
    """The rates of single messages, without ``latency_us`` each; None without messages.

    A host's rate is that of its fastest pair, since slower pairs are limited by the other end.
    """
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    flights = list(_flights(trace))
    for message in list(_alone(flights)) or flights:
        took_ns = max(1.0, message.end_ns - message.begin_ns - latency_us * 1e3)
        seen[message.hosts].append(8 * message.size_bytes / took_ns)
    rates = {hosts: float(np.quantile(pair_rates, 1 - OF_THE_FASTEST)) for hosts, pair_rates in seen.items()}
    if not rates:
        return None
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    for (sender, receiver), rate in rates.items():
        if sender == receiver:
            continue
        up[sender] = max(up.get(sender, 0.0), rate)
        down[receiver] = max(down.get(receiver, 0.0), rate)
    local = (rate for (sender, receiver), rate in rates.items() if sender == receiver)
    return Rates(up, down, min(local, default=None))


class _Flight(NamedTuple):
    hosts: tuple[str, str]
    begin_ns: int
    end_ns: int
    size_bytes: int
    awaited: bool  # whether the receiver waited for it, so that its arrival time is exact


def _flights(trace: Trace) -> Iterator[_Flight]:
    """Messages, from the moment at which both sides had requested them."""
    waits = {
        rank: Intervals((row.start_ns, row.end_ns) for row in events.of_kind(Kind.WAIT))
        for rank, events in trace.events.items()
    }
    for message in both_ends(trace):
        hosts = trace.hosts[message.sender], trace.hosts[message.receiver]
        begin_ns, end_ns, size_bytes = message.begin_ns, message.received.end_ns, message.received.size_bytes
        if end_ns > begin_ns and size_bytes > 0:
            waited_ns = waits[message.receiver].share_of(begin_ns, end_ns) * (end_ns - begin_ns)
            yield _Flight(hosts, begin_ns, end_ns, size_bytes, waited_ns > SHORT_WAIT_NS)


def _alone(flights: list[_Flight]) -> Iterator[_Flight]:
    """Messages with an exact end that shared the links of neither host with another message."""
    disturbed = _overlapping(flights, 0) | _overlapping(flights, 1)
    for number, flight in enumerate(flights):
        source, target = flight.hosts
        if flight.awaited and (source == target or number not in disturbed):
            yield flight


def _overlapping(flights: list[_Flight], end: int) -> set[int]:
    """Indices of messages that overlap another one of the same sending (``end`` 0) or receiving host (1)."""
    overlapping: set[int] = set()
    longest: dict[str, int] = {}  # host -> the earlier flight that ends last
    for number in sorted(range(len(flights)), key=lambda number: flights[number].begin_ns):
        host = flights[number].hosts[end]
        before = longest.get(host)
        if before is not None and flights[before].end_ns > flights[number].begin_ns:
            overlapping |= {before, number}
        if before is None or flights[number].end_ns > flights[before].end_ns:
            longest[host] = number
    return overlapping


DEFAULT_LATENCY_US = 100.0  # of a Gloo message
ASSUMED_GBPS = 100.0  # between workers, if only one was recorded
NO_LINK = "one rank: no link"
NCCL_LATENCY_US = 5.0
DEFAULT_LOCAL_GBPS = 20.0
NCCL_KERNEL = re.compile("[nr]ccl", re.IGNORECASE)
HUBER_LIMIT, HUBER_ROUNDS = 1.345, 20


@dataclass(frozen=True, slots=True)
class BusyPeriod:
    """A period in which gradients were in flight without a pause."""

    count: int
    wire_bytes: float  # what each rank sent to its neighbour in the ring
    duration_ns: int


def cluster_from_trace(trace: Trace) -> Cluster:
    """Fit the links of the recorded job: one rate for all hosts, and the overhead of collectives.

    For a pipeline, uses the rates of messages between stages. Otherwise regresses the duration of busy periods on the
    number of collectives and the bytes sent, robustly; ``source`` states the error. Raises TraceError if the trace has
    no collective of all ranks, or if ranks of one host are not consecutive.
    """
    if trace.stages and (rates := message_rates(trace, DEFAULT_LATENCY_US)):
        return _with_rates(
            _cluster(trace, 100.0, host_costs(trace), "fitted from the messages of a trace"), rates
        )
    periods, names = busy_periods(trace)
    if trace.world_size == 1 or not periods:
        if trace.world_size > 1:
            raise TraceError(
                "link rates cannot be fitted: the trace has no collective of all ranks with a known size",
                fix="Measure the links with headway probe and pass --cluster.",
            )
        return _cluster(trace, ASSUMED_GBPS, {}, NO_LINK)
    fit = _fit(periods)
    if fit.ns_per_byte <= 0:
        raise TraceError(
            "link rates cannot be fitted: the trace's collectives have no duration",
            fix="Measure the links with headway probe and pass --cluster.",
        )
    cost = AlgorithmCost(overhead_us=fit.overhead_ns / 1e3, fit_error=fit.error)
    source = f"fitted from the trace, with a median error of {fit.error:.1%} for its collectives"
    flat = _cluster(trace, 8.0 / fit.ns_per_byte, dict.fromkeys(names, cost) | host_costs(trace), source)
    if flat.library != "nccl":
        return flat
    from headway.network.nccl_tests import with_nccl

    return with_nccl(trace, flat, fit.error)


def library_of(trace: Trace) -> Literal["gloo", "nccl"]:
    """The library of the recorded process group (RCCL counts as NCCL).

    Decides by the names of kernels, if there are any, and else by the backend; a group with both backends counts as
    Gloo.
    """
    for events in trace.events.values():
        if any(NCCL_KERNEL.match(name) for name in set(events.of_kind(Kind.COLLECTIVE).algorithm)):
            return "nccl"
    backend = trace.manifest.ranks[0].backend.lower()
    return "nccl" if "nccl" in backend and "gloo" not in backend else "gloo"


def host_costs(trace: Trace) -> dict[str, AlgorithmCost]:
    """The costs of updates off the main thread on the recorded hosts; empty without such updates."""
    calls_ns = _step_calls_ns(trace)
    if not calls_ns:
        return {}
    updates_ns = [background_update_cost(e, trace.world_size).overhead_ns for e in trace.events.values()]
    return {
        STEP_CALL: AlgorithmCost(overhead_us=float(np.mean(calls_ns)) / 1e3),  # paid by each of several calls
        **dict.fromkeys(
            (DEFERRED_UPDATE, BACKGROUND_UPDATE),
            AlgorithmCost(overhead_us=float(np.median(updates_ns)) / 1e3),
        ),
    }


def _step_calls_ns(trace: Trace) -> list[int]:
    """The durations of ``optimizer.step()`` calls without waits, if updates ran off the main thread."""
    durations_ns: list[int] = []
    for events in trace.events.values():
        if any(is_background(row) for row in events.of_kind(Kind.UPDATE)):
            waits = Intervals((row.start_ns, row.end_ns) for row in events.of_kind(Kind.WAIT))
            calls = events.of_kind(Kind.OPTIMIZER)
            durations_ns += [round(c.duration_ns * (1 - waits.share_of(c.start_ns, c.end_ns))) for c in calls]
    return durations_ns


def busy_periods(trace: Trace) -> tuple[list[BusyPeriod], list[str]]:
    """The busy periods of gradient collectives, from the request of the last rank, and the names of their costs.

    Without gradient collectives, every collective counts.
    """
    of_gradients = any((events.bucket >= 0).any() for events in trace.events.values())
    members: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for events in trace.events.values():
        for row in events.of_kind(Kind.COLLECTIVE):
            counts = row.bucket >= 0 if of_gradients else row.size_bytes > 0
            if counts and row.name in OF_LIBRARIES:
                members[row.name, row.group, row.sequence].append(row)
    spans = []
    library_algorithm = NCCL if library_of(trace) == "nccl" else NATIVE
    names: set[str] = set()
    places = _hosts_of_all(trace)
    hosts = Hosts.of_places([places[rank] for rank in range(trace.world_size)])
    for (kind, _, _), rows in members.items():
        if len(rows) == len(trace.events):
            begin_ns, end_ns = max(row.enqueue_ns for row in rows), max(row.end_ns for row in rows)
            algorithm = rows[0].algorithm if _is_ours(rows[0].algorithm) else library_algorithm
            names.add(cost_name(algorithm, kind))
            sent = sent_bytes(algorithm, kind, trace.world_size, rows[0].size_bytes, hosts)
            spans.append((begin_ns, end_ns, sent))
    periods: list[BusyPeriod] = []
    open_until_ns = begin_ns = count = 0
    wire_bytes = 0.0
    for start_ns, end_ns, size in sorted(spans):
        if start_ns > open_until_ns and count:
            periods.append(BusyPeriod(count, wire_bytes, open_until_ns - begin_ns))
            count, wire_bytes = 0, 0.0
        if count == 0:
            begin_ns = start_ns
        count, wire_bytes, open_until_ns = count + 1, wire_bytes + size, max(open_until_ns, end_ns)
    if count:
        periods.append(BusyPeriod(count, wire_bytes, open_until_ns - begin_ns))
    return periods, sorted(names)


def _is_ours(algorithm: str) -> bool:
    """Whether a recorded algorithm is one of Headway's, not of a backend."""
    return algorithm in ALGORITHMS and not ALGORITHMS[algorithm].is_library


class _Fit(NamedTuple):
    overhead_ns: float  # per collective
    ns_per_byte: float
    error: float  # median relative error of a period


def _fit(periods: list[BusyPeriod]) -> _Fit:
    """Fit overhead (ns per collective, >= 0) and cost (ns per byte, > 0) to the busy periods.

    Minimizes relative errors with Huber's criterion (1964), so that a few disturbed periods do not decide.
    """
    counts = np.array([period.count for period in periods], dtype=float)
    sizes = np.array([period.wire_bytes for period in periods])
    durations = np.maximum(1.0, np.array([period.duration_ns for period in periods], dtype=float))
    ns_per_byte = float(np.median(durations / np.maximum(sizes, 1.0)))
    overhead_ns = 0.0
    spread = float(np.ptp(sizes / counts)) / max(1.0, float(np.max(sizes / counts)))
    if len(periods) >= 4 and spread >= 0.05:  # with one size only, rate and overhead cannot be told apart
        columns = np.stack([counts, sizes], axis=1) / durations[:, None]
        solution = _robust(columns)
        if solution[0] < 0:
            solution = np.array([0.0, *_robust(columns[:, 1:])])
        if solution[1] > 0:
            overhead_ns, ns_per_byte = solution.tolist()
    errors = np.abs((overhead_ns * counts + ns_per_byte * sizes) / durations - 1)
    return _Fit(overhead_ns, ns_per_byte, float(np.median(errors)))


def _robust(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.floating]:
    """The weights for which the weighted sum of ``columns`` is nearest to one, by Huber's criterion."""
    weights = np.ones(len(columns))
    solution: npt.NDArray[np.floating] = np.zeros(columns.shape[1])
    for _ in range(HUBER_ROUNDS):
        solution, *_ = np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)
        residuals = np.abs(columns @ solution - 1)
        scale = max(1e-6, 1.4826 * float(np.median(residuals)))
        weights = np.sqrt(np.minimum(1.0, HUBER_LIMIT * scale / np.maximum(residuals, 1e-12)))
    return solution


def _cluster(trace: Trace, gbps: float, costs: dict[str, AlgorithmCost], source: str) -> Cluster:
    workers: dict[str, int] = {}
    before = ""
    hosts = _hosts_of_all(trace)
    for rank in range(trace.world_size):
        host = hosts[rank]
        if host in workers and host != before:
            raise TraceError(
                "ranks that alternate between hosts are not supported yet",
                got=f"rank {rank} on {host} again, after {before}",
                expected="consecutive ranks on each host",
                fix="Place ranks host by host, as torchrun does.",
            )
        before = host
        workers[host] = workers.get(host, 0) + 1
    rate, library = max(gbps, 1e-6), library_of(trace)
    return Cluster(
        hosts=tuple(
            Host(name=name, workers=count, up_gbps=rate, down_gbps=rate) for name, count in workers.items()
        ),
        latency_us=NCCL_LATENCY_US if library == "nccl" else DEFAULT_LATENCY_US,
        local_gbps=rate if len(workers) == 1 else max(rate, DEFAULT_LOCAL_GBPS),
        algorithms=costs,
        library=library,
        source=source,
    )


def _with_rates(cluster: Cluster, rates: Rates) -> Cluster:
    hosts = tuple(
        host.model_copy(
            update={
                "up_gbps": rates.up.get(host.name, host.up_gbps),
                "down_gbps": rates.down.get(host.name, host.down_gbps),
            }
        )
        for host in cluster.hosts
    )
    return cluster.model_copy(update={"hosts": hosts, "local_gbps": rates.local or DEFAULT_LOCAL_GBPS})


def _hosts_of_all(trace: Trace) -> list[str]:
    """The host of each rank; an unrecorded rank is assumed on the host of the recorded rank before (or after) it."""
    recorded = sorted(trace.hosts)
    return [
        trace.hosts[
            max((recorded_rank for recorded_rank in recorded if recorded_rank <= rank), default=recorded[0])
        ]
        for rank in range(trace.world_size)
    ]
