"""Fitting a cluster from a trace: link goodput and a collective's overhead from the all-reduces it recorded."""

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

UNEQUAL = 1.1  # times the slowest rate
MOST_STRIDES = 3


def link_rates(measured: Callable[[int], Sequence[float]]) -> tuple[list[float], list[float]]:
    """What the link of each place carries up and down; ``measured`` has each send so many places on, all at once.

    It is asked for the next one, and where rates differ for others as well.
    """
    found = {1: measured(1)}
    places = len(found[1])
    if places > 2 and max(found[1]) > min(found[1]) * UNEQUAL:
        for stride in range(2, min(places, MOST_STRIDES + 1)):
            found[stride] = measured(stride)
    return attributed(found)


def attributed(rates: Mapping[int, Sequence[float]]) -> tuple[list[float], list[float]]:
    """What links carry up and down where place ``i`` sent to place ``i + stride`` at ``rates[stride][i]``."""
    places = range(len(rates[1]))
    up = [max(rate[place] for rate in rates.values()) for place in places]
    down = [max(own[place - stride] for stride, own in rates.items()) for place in places]
    return up, down


SHORT_WAIT_NS = 100_000  # for what has arrived before
OF_THE_FASTEST = 0.1  # of a pair's messages: who waits for others first is told of an arrival late


class Rates(NamedTuple):
    """Of messages out of, into and within hosts, in Gbit/s; what no message took is left out."""

    up: dict[str, float]
    down: dict[str, float]
    local: float | None


def message_rates(trace: Trace, latency_us: float) -> Rates | None:
    """What single messages went at, less ``latency_us`` each; None where there are none.

    A host's rate is that of its fastest pair: a slower one is slow for the other end's sake.
    """
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    flights = list(_flights(trace))
    for message in list(_alone(flights)) or flights:
        took_ns = max(1.0, message.end_ns - message.begin_ns - latency_us * 1e3)
        seen[message.hosts].append(8 * message.size_bytes / took_ns)
    rates = {hosts: float(np.quantile(each, 1 - OF_THE_FASTEST)) for hosts, each in seen.items()}
    if not rates:
        return None
    up: dict[str, float] = {}
    down: dict[str, float] = {}
    for (sender, receiver), rate in rates.items():
        if sender == receiver:
            continue
        up[sender] = max(up.get(sender, 0.0), rate)
        down[receiver] = max(down.get(receiver, 0.0), rate)
    return Rates(up, down, min((rate for (one, other), rate in rates.items() if one == other), default=None))


class _Flight(NamedTuple):
    hosts: tuple[str, str]
    begin_ns: int
    end_ns: int
    size_bytes: int
    awaited: bool  # whether the receiver waited when it arrived, and so knows when


def _flights(trace: Trace) -> Iterator[_Flight]:
    """Messages, from when both sides had asked for them."""
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
    """Those with a known end, during which neither host sent, or received, another one, if they are on two."""
    disturbed = _overlapping(flights, 0) | _overlapping(flights, 1)
    for number, flight in enumerate(flights):
        source, target = flight.hosts
        if flight.awaited and (source == target or number not in disturbed):
            yield flight


def _overlapping(flights: list[_Flight], end: int) -> set[int]:
    """The numbers of those that overlap with another of the same host: the sender (``end`` 0) or the receiver (1)."""
    found: set[int] = set()
    longest: dict[str, int] = {}  # of each host, the flight that ends last of those before
    for number in sorted(range(len(flights)), key=lambda number: flights[number].begin_ns):
        host = flights[number].hosts[end]
        before = longest.get(host)
        if before is not None and flights[before].end_ns > flights[number].begin_ns:
            found |= {before, number}
        if before is None or flights[number].end_ns > flights[before].end_ns:
            longest[host] = number
    return found


DEFAULT_LATENCY_US = 100.0  # of a message of Gloo's
ASSUMED_GBPS = 100.0  # between workers, of whom one was recorded
NO_LINK = "one rank: no link"
NCCL_LATENCY_US = 5.0
DEFAULT_LOCAL_GBPS = 20.0
NCCL_KERNEL = re.compile("[nr]ccl", re.IGNORECASE)
HUBER_LIMIT, HUBER_ROUNDS = 1.345, 20


@dataclass(frozen=True, slots=True)
class BusyPeriod:
    """A time during which gradients were in flight without a pause."""

    count: int
    wire_bytes: float  # what each rank sent to its neighbour in the ring
    duration_ns: int


def cluster_from_trace(trace: Trace) -> Cluster:
    """Fit the links of the job that was recorded: one rate for all hosts, and the collective's overhead.

    Those of a pipeline are the rates of messages between its stages. Others are fitted from busy time against the
    number of collectives and the bytes sent, over the periods in which gradients were in flight, robustly; ``source``
    says how far off that is. Raises TraceError where the trace holds no collective of all ranks, or where ranks of
    one host are not consecutive.
    """
    if trace.stages and (rates := message_rates(trace, DEFAULT_LATENCY_US)):
        return _with_rates(
            _cluster(trace, 100.0, host_costs(trace), "fitted from the messages of a trace"), rates
        )
    periods, names = busy_periods(trace)
    if trace.world_size == 1 or not periods:
        if trace.world_size > 1:
            raise TraceError(
                "the trace holds no collective of all ranks that says how much it carries, so link rates cannot be "
                "fitted",
                fix="Measure the links with headway probe and pass --cluster.",
            )
        return _cluster(trace, ASSUMED_GBPS, {}, NO_LINK)
    fit = _fit(periods)
    if fit.ns_per_byte <= 0:
        raise TraceError(
            "the trace's collectives took no time, so link rates cannot be fitted",
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
    """Whose collectives the recorded process group's own are; RCCL's are NCCL's.

    The names of kernels say so, where there are any; else the backend: a group that has both, each for devices of its
    own, is taken for Gloo's.
    """
    for events in trace.events.values():
        if any(NCCL_KERNEL.match(name) for name in set(events.of_kind(Kind.COLLECTIVE).algorithm)):
            return "nccl"
    backend = trace.manifest.ranks[0].backend.lower()
    return "nccl" if "nccl" in backend and "gloo" not in backend else "gloo"


def host_costs(trace: Trace) -> dict[str, AlgorithmCost]:
    """What updates off the main thread cost the hosts that recorded them; empty where there were none."""
    calls_ns = _step_calls_ns(trace)
    if not calls_ns:
        return {}
    updates_ns = [background_update_cost(e, trace.world_size).overhead_ns for e in trace.events.values()]
    return {
        STEP_CALL: AlgorithmCost(overhead_us=float(np.mean(calls_ns)) / 1e3),  # each of several calls pays it
        **dict.fromkeys(
            (DEFERRED_UPDATE, BACKGROUND_UPDATE),
            AlgorithmCost(overhead_us=float(np.median(updates_ns)) / 1e3),
        ),
    }


def _step_calls_ns(trace: Trace) -> list[int]:
    """What the calls of ``optimizer.step()`` took, but for waits, where updates were done off the main thread."""
    found: list[int] = []
    for events in trace.events.values():
        if any(is_background(row) for row in events.of_kind(Kind.UPDATE)):
            waits = Intervals((row.start_ns, row.end_ns) for row in events.of_kind(Kind.WAIT))
            calls = events.of_kind(Kind.OPTIMIZER)
            found += [round(c.duration_ns * (1 - waits.share_of(c.start_ns, c.end_ns))) for c in calls]
    return found


def busy_periods(trace: Trace) -> tuple[list[BusyPeriod], list[str]]:
    """The periods of each recorded step in which a collective of gradients, asked for by all, was in flight.

    Where there are no gradients every collective counts. And the names of what these collectives cost.
    """
    of_gradients = any((events.bucket >= 0).any() for events in trace.events.values())
    members: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    for events in trace.events.values():
        for row in events.of_kind(Kind.COLLECTIVE):
            known = row.bucket >= 0 if of_gradients else row.size_bytes > 0
            if known and row.name in OF_LIBRARIES:
                members[row.name, row.group, row.sequence].append(row)
    spans = []
    own = NCCL if library_of(trace) == "nccl" else NATIVE
    names: set[str] = set()
    places = _hosts_of_all(trace)
    hosts = Hosts.of_places([places[rank] for rank in range(trace.world_size)])
    for (kind, _, _), rows in members.items():
        if len(rows) == len(trace.events):
            begin_ns, end_ns = max(row.enqueue_ns for row in rows), max(row.end_ns for row in rows)
            algorithm = rows[0].algorithm if _is_ours(rows[0].algorithm) else own
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
    """Whether a recorded algorithm is one of Headway's, not what a backend calls its own."""
    return algorithm in ALGORITHMS and not ALGORITHMS[algorithm].is_library


class _Fit(NamedTuple):
    overhead_ns: float  # a collective
    ns_per_byte: float
    error: float  # by how much a period is off, in the median


def _fit(periods: list[BusyPeriod]) -> _Fit:
    """Overhead (ns a collective, >= 0) and cost (ns a byte, > 0) that explain the busy periods best.

    Relative errors count, and those far off the others count less the further off they are (Huber, 1964), so that a
    few periods in which something else held the network up do not decide.
    """
    counts = np.array([period.count for period in periods], dtype=float)
    sizes = np.array([period.wire_bytes for period in periods])
    durations = np.maximum(1.0, np.array([period.duration_ns for period in periods], dtype=float))
    ns_per_byte = float(np.median(durations / np.maximum(sizes, 1.0)))
    overhead_ns = 0.0
    spread = float(np.ptp(sizes / counts)) / max(1.0, float(np.max(sizes / counts)))
    if len(periods) >= 4 and spread >= 0.05:  # with one size only, rate and overhead cannot be told apart
        columns = np.stack([counts, sizes], axis=1) / durations[:, None]
        found = _robust(columns)
        if found[0] < 0:
            found = np.array([0.0, *_robust(columns[:, 1:])])
        if found[1] > 0:
            overhead_ns, ns_per_byte = found.tolist()
    errors = np.abs((overhead_ns * counts + ns_per_byte * sizes) / durations - 1)
    return _Fit(overhead_ns, ns_per_byte, float(np.median(errors)))


def _robust(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.floating]:
    """The weights of ``columns`` whose sum is nearest to one, by Huber's criterion."""
    weights = np.ones(len(columns))
    found: npt.NDArray[np.floating] = np.zeros(columns.shape[1])
    for _ in range(HUBER_ROUNDS):
        found, *_ = np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)
        residuals = np.abs(columns @ found - 1)
        scale = max(1e-6, 1.4826 * float(np.median(residuals)))
        weights = np.sqrt(np.minimum(1.0, HUBER_LIMIT * scale / np.maximum(residuals, 1e-12)))
    return found


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
                expected="the ranks of a host one after another",
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
    """The host of each rank; one that was not recorded is taken to be where the rank before it is, or the next one."""
    recorded = sorted(trace.hosts)
    return [
        trace.hosts[max((each for each in recorded if each <= rank), default=recorded[0])]
        for rank in range(trace.world_size)
    ]
