"""Parses ``--what-if`` and applies it to jobs: changes to the cluster, to computation times, and incidents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from headway import files
from headway.cluster import Cluster, Host, Traffic
from headway.errors import UserError, did_you_mean
from headway.incidents import Incidents
from headway.job import Job
from headway.units import counted, format_rate, parse_duration_s, parse_factor, parse_rate_gbps

SLOWDOWN, DIES, JOINS = "random-slowdown", "dies", "joins"
INCIDENT_FORMS = "random-slowdown:10%=3x, dies:3@2s, joins:3@5s"
_RANK_AT = re.compile(r"([0-9]{1,9})@(.+)")
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%")
LONGEST_S = 1e6
LARGEST = 1e6  # factor


def incidents_of(texts: Iterable[str]) -> tuple[Incidents, list[str]]:
    """The incidents in ``texts``, and the remaining texts. Raises UserError."""
    incidents, remaining = Incidents(), []
    for text in texts:
        changed = _with_incident(text, incidents)
        if changed is None:
            remaining.append(text)
        else:
            incidents = changed
    if (rank := incidents.twice()) is not None:
        raise UserError(
            f"--what-if: rank {rank} dies or joins twice in a row", got=", ".join(incidents.describe()),
            expected="a death between two joins, and a join between two deaths",
        )  # fmt: skip
    return incidents, remaining


def _with_incident(text: str, incidents: Incidents) -> Incidents | None:
    """``incidents`` plus the one in ``text``; None if ``text`` is not an incident. Raises UserError."""
    key, equals, value = text.partition("=")
    what, _, whose = key.partition(":")
    if what == SLOWDOWN:
        if incidents.slow_share:
            raise UserError(f"--what-if {SLOWDOWN} is given twice", got=repr(text), expected="one of them")
        share = _SHARE.fullmatch(whose)
        if not equals or share is None or not 0 < float(share[1]) <= 100:
            raise UserError(
                f"--what-if {SLOWDOWN} cannot be read", got=repr(text),
                expected="a share of iterations and a factor, such as random-slowdown:10%=3x",
            )  # fmt: skip
        factor = parse_factor(value, f"--what-if {key}")
        if factor > LARGEST:
            raise UserError(
                f"--what-if {key} is out of range", got=f"{factor:g}x", expected=f"at most {LARGEST:g}x"
            )
        return replace(incidents, slow_share=float(share[1]) / 100, slow_factor=factor)
    if what not in (DIES, JOINS) or ":" not in key:
        return None
    read = None if equals else _RANK_AT.fullmatch(whose)
    if read is None:
        raise UserError(
            f"--what-if {what} cannot be read",
            got=repr(text),
            expected=f"a rank and a time, such as {what}:3@2s",
        )
    time_s = parse_duration_s(read[2], f"--what-if {what}")
    if not 1e-9 <= time_s <= LONGEST_S:
        raise UserError(f"--what-if {what} is out of range", got=read[2], expected=f"1 ns to {LONGEST_S:g} s")
    event = (round(time_s * 1e9), int(read[1]))
    if what == DIES:
        return replace(incidents, deaths=(*incidents.deaths, event))
    return replace(incidents, joins=(*incidents.joins, event))


MAX_WORKERS = 65_536
MAX_WORKERS_A_HOST = 4096
LEAST_FACTOR = 1e-6
FORMS = (
    "bandwidth=2x, latency=0.5x, compute=0.5x, workers=8, workers=4x8, bandwidth:HOST=0.5x, compute:RANK=2x, "
    f"kernels:PATTERN=0.5x, traffic:HOST:HOST=100mbit, {INCIDENT_FORMS}"
)
TRAFFIC_FORM = "a rate such as 100mbit, or a rate for a while such as 100mbit@200ms-1s"
UP, DOWN = "up", "down"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Factors on the recorded cluster and computation, another number of workers, other traffic, and incidents.

    ``bandwidth`` multiplies link rates, ``latency`` link latencies, ``compute`` computation times (0.5: devices twice as
    fast). ``link_factors`` multiplies single links by (host, "up" or "down"), ``rank_factors`` the computation times of
    single ranks, ``kernel_factors`` those of operators, kernels or modules that match a pattern (``fnmatch``).
    ``traffic`` is additional traffic of other jobs, ``incidents`` are slowdowns, deaths and joins. Each worker keeps its
    batch if the number of workers changes.
    """

    bandwidth: float = 1.0
    latency: float = 1.0
    compute: float = 1.0
    workers: int | None = None
    workers_a_host: int | None = None
    link_factors: Mapping[tuple[str, str], float] = field(default_factory=dict)
    rank_factors: Mapping[int, float] = field(default_factory=dict)
    kernel_factors: Mapping[str, float] = field(default_factory=dict)
    traffic: tuple[Traffic, ...] = ()
    incidents: Incidents = field(default_factory=Incidents)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> WhatIf:
        """Parse ``K=V`` texts; factors of repeated keys multiply. Raises UserError for invalid texts."""
        factors = {"bandwidth": 1.0, "latency": 1.0, "compute": 1.0}
        link_factors: dict[tuple[str, str], float] = {}
        rank_factors: dict[int, float] = {}
        workers = workers_a_host = None
        traffic: list[Traffic] = []
        kernel_factors: dict[str, float] = {}
        incidents, remaining = incidents_of(texts)
        for text in remaining:
            key, equals, value = text.partition("=")
            what, colon, whose = key.partition(":")
            if equals and key == "workers":
                if workers is not None:
                    raise UserError(
                        "--what-if workers is given twice", got=repr(text), expected="one of them"
                    )
                workers, workers_a_host = _parse_workers(value)
            elif equals and key in factors:
                factors[key] *= parse_factor(value, f"--what-if {key}")
            elif equals and colon and what == "bandwidth" and whose:
                factor = parse_factor(value, f"--what-if {key}")
                for link in _links(whose):
                    link_factors[link] = link_factors.get(link, 1.0) * factor
            elif equals and colon and what == "compute" and whose.isdecimal() and len(whose) < 10:
                factor = parse_factor(value, f"--what-if {key}")
                rank_factors[int(whose)] = rank_factors.get(int(whose), 1.0) * factor
            elif equals and what == "kernels" and whose:
                factor = parse_factor(value, f"--what-if {key}")
                kernel_factors[whose] = kernel_factors.get(whose, 1.0) * factor
            elif equals and what == "traffic" and whose.count(":") == 1:
                source, target = whose.split(":")
                traffic.append(_traffic(source, target, value))
            else:
                keys = (*factors, "workers", "kernels", "traffic", "dies", "joins", "random-slowdown")
                fix = "" if what in keys else did_you_mean(what, keys)
                raise UserError("--what-if cannot be read", got=repr(text), expected=FORMS, fix=fix)
        for named, factor in (
            *factors.items(),
            *link_factors.items(),
            *rank_factors.items(),
            *kernel_factors.items(),
        ):
            if not LEAST_FACTOR <= factor <= 1 / LEAST_FACTOR:
                expected = f"{LEAST_FACTOR:g}x to {1 / LEAST_FACTOR:g}x in all"
                raise UserError(f"--what-if {named} is out of range", got=f"{factor:g}x", expected=expected)
        return cls(
            workers=workers,
            workers_a_host=workers_a_host,
            link_factors=link_factors,
            rank_factors=rank_factors,
            kernel_factors=kernel_factors,
            traffic=tuple(traffic),
            incidents=incidents,
            bandwidth=factors["bandwidth"],
            latency=factors["latency"],
            compute=factors["compute"],
        )

    def rewrite(self, job: Job) -> Job:
        """``job`` under this what-if; repeated what-ifs multiply.

        Raises UserError for unknown hosts and ranks, TraceError for kernels that were not recorded.
        """
        computation = job.steps
        if self.kernel_factors:
            computation = computation.kernels_scaled(self.kernel_factors)
        computation = computation.scaled(self.compute, self.rank_factors)
        moved = job.moved_to(self.apply(job.on))
        incidents = self.incidents if self.incidents.are_there else job.incidents
        return replace(moved, computation=computation, incidents=incidents)

    def without_members(self) -> WhatIf:
        """The same without deaths and joins."""
        return replace(self, incidents=self.incidents.without_members())

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster under this what-if. Raises UserError for unknown hosts and ranks."""
        changed = cluster.scaled(bandwidth=self.bandwidth, latency=self.latency, host=self.compute)
        if self.workers is not None:
            changed = changed.resized(self.workers, self.workers_a_host)
        names = {host.name for host in changed.hosts}
        named_hosts = [("bandwidth", name) for name, _ in self.link_factors]
        named_hosts += [("traffic", name) for flow in self.traffic for name in (flow.source, flow.target)]
        for key, name in named_hosts:
            if name not in names:
                hosts = ", ".join(sorted(names)[:8]) + (" and more" if len(names) > 8 else "")
                raise UserError(f"--what-if {key}: unknown host", got=repr(name), expected=hosts)
        named = [("compute", rank) for rank in self.rank_factors]
        named += [("dies or joins", rank) for rank in sorted(self.incidents.ranks)]
        for key, rank in named:
            if rank >= changed.world_size:
                expected = f"0 to {changed.world_size - 1}"
                raise UserError(f"--what-if {key}: unknown rank", got=rank, expected=expected)
        return changed.model_copy(
            update={
                "hosts": tuple(map(self._linked, changed.hosts)) if self.link_factors else changed.hosts,
                "traffic": (*changed.traffic, *self.traffic),
            }
        )

    def _linked(self, host: Host) -> Host:
        up, down = (self.link_factors.get((host.name, way), 1.0) for way in (UP, DOWN))
        return host.model_copy(update={"up_gbps": host.up_gbps * up, "down_gbps": host.down_gbps * down})

    def describe(self) -> str:
        """Describe the changes; empty if there are none."""
        changes = [
            f"{what} {factor:g} times the recorded"
            for what, factor in (
                ("bandwidth", self.bandwidth),
                ("latency", self.latency),
                ("compute time", self.compute),
                *(
                    (f"bandwidth {way} of {name}", factor)
                    for (name, way), factor in self.link_factors.items()
                ),
                *((f"compute time of rank {rank}", factor) for rank, factor in self.rank_factors.items()),
                *((f"time of {pattern}", factor) for pattern, factor in self.kernel_factors.items()),
            )
            if factor != 1.0
        ]
        changes += [
            f"other traffic of {format_rate(flow.gbps)} from {flow.source} to {flow.target}"
            for flow in self.traffic
        ]
        if self.workers is not None:
            changes.append(
                counted(self.workers, "worker")
                + (f", {self.workers_a_host} a host" if self.workers_a_host else "")
            )
        return ", ".join((*changes, *self.incidents.describe()))


def _links(whose: str) -> list[tuple[str, str]]:
    """The links of ``HOST``, or the one of ``HOST:up`` or ``HOST:down``."""
    name, colon, way = whose.rpartition(":")
    if colon and name and way in (UP, DOWN):
        return [(name, way)]
    return [(whose, UP), (whose, DOWN)]


def _traffic(source: str, target: str, value: str) -> Traffic:
    """Parse ``RATE`` or ``RATE@START-END``."""
    rate, at, when = value.partition("@")
    start, dash, end = when.partition("-")
    if at and not (dash and start and end):
        raise UserError("--what-if traffic cannot be read", got=repr(value), expected=TRAFFIC_FORM)
    moments_ms = {
        name: parse_duration_s(text, "--what-if traffic", zero=True) * 1e3
        for name, text in (("start_ms", start), ("end_ms", end))
        if text
    }
    document = {"source": source, "target": target, "gbps": parse_rate_gbps(rate, "--what-if traffic")}
    return files.validate({**document, **moments_ms}, Traffic, UserError, "--what-if traffic")


def _parse_workers(value: str) -> tuple[int, int | None]:
    """Parse ``N`` or ``HOSTSxN``: the number of workers, and per host in the second form."""
    hosts, times, per_host = value.partition("x")
    parts = [hosts, per_host] if times else [value]
    if all(part.isdecimal() and len(part) < 8 for part in parts):
        workers = int(parts[0]) * int(parts[-1]) if times else int(value)
        if 1 <= workers <= MAX_WORKERS and (not times or int(per_host) <= MAX_WORKERS_A_HOST):
            return workers, int(per_host) if times else None
    raise UserError(
        "--what-if workers cannot be read", got=repr(value),
        expected=f"a number from 1 to {MAX_WORKERS}, or HOSTSxN with at most {MAX_WORKERS_A_HOST} a host",
    )  # fmt: skip
