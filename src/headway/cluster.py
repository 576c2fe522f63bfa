"""Cluster: the hosts of a job, their workers and their links, measured or written by hand.

A link's cost is the alpha-beta model: a message of ``n`` bytes takes ``latency + n / rate``. Every host
has one link with two directions (``up`` and ``down``) that all of its workers share; workers of one host
talk over memory.
Rates are goodput, payload bits a second, not the nominal rate of the wire.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headway import files
from headway.errors import ClusterError

FORMAT: Literal[1] = 1
MAX_WORLD_SIZE = 100_000

# Costs besides those of collectives that a cluster may hold.
DEFERRED_UPDATE = "deferred_update"  # what an optimizer's step costs by itself, paid once a bucket
BACKGROUND_UPDATE = (
    "background_update"  # the same on a communication thread, which shares cores with training
)
EARLIER_BACKGROUND_UPDATE = "update_beside"  # as cluster files of earlier versions call it
STEP_CALL = "step_call"  # what optimizer.step() costs its caller where the update happens elsewhere
# What the decoupled runtime costs the main thread on top of stock DDP: each parameter in a forward, a backward and a
# step, and copying one MiB of parameters out of buckets.
RUNTIME_FORWARD, RUNTIME_BACKWARD, RUNTIME_STEP = "runtime_forward", "runtime_backward", "runtime_step"
COPY_MIB = "copy_mib"
RUNTIME_COSTS = (RUNTIME_FORWARD, RUNTIME_BACKWARD, RUNTIME_STEP, COPY_MIB)
HOST_COSTS = (DEFERRED_UPDATE, BACKGROUND_UPDATE, STEP_CALL, *RUNTIME_COSTS)

Rate = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # up to a quarter of an hour
Share = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Moment = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]

_FROZEN = ConfigDict(frozen=True, extra="forbid")


class Host(BaseModel):
    """One machine: its workers and the goodput of its link in each direction."""

    model_config = _FROZEN

    name: str = Field(min_length=1, max_length=200)
    """Its name, which no other host has."""

    workers: int = Field(ge=1, le=4096)
    """The number of workers on it."""

    up_gbps: Rate
    """The rate of its link from the host, in Gbit/s."""

    down_gbps: Rate
    """The rate of its link to the host, in Gbit/s."""


class ServerHost(BaseModel):
    """A machine without workers, for servers of ``parameter_server``, and the goodput of its link."""

    model_config = _FROZEN

    name: str = Field(min_length=1, max_length=200)
    """Its name, which no other host has."""

    up_gbps: Rate
    """The rate of its link from the host, in Gbit/s."""

    down_gbps: Rate
    """The rate of its link to the host, in Gbit/s."""


class SlowPath(BaseModel):
    """What is between two hosts, in one direction, where it is slower or longer than their links are."""

    model_config = _FROZEN

    source: str
    """The name of the host that sends."""

    target: str
    """The name of the host that receives."""

    gbps: Rate | None = None
    """The goodput of each connection at most, in Gbit/s; without it, what the links of both hosts carry."""

    latency_us: Latency | None = None
    """The latency of this way; without it, the cluster's."""

    @model_validator(mode="after")
    def _differs(self) -> SlowPath:
        if self.gbps is None and self.latency_us is None:
            raise ValueError(
                f"the path from {self.source!r} to {self.target!r} has neither gbps nor latency_us"
            )
        return self

    def scaled(self, bandwidth: float, latency: float) -> SlowPath:
        """The same with its rate and its latency multiplied."""
        return self.model_copy(
            update={
                "gbps": None if self.gbps is None else self.gbps * bandwidth,
                "latency_us": None if self.latency_us is None else self.latency_us * latency,
            }
        )


class Traffic(BaseModel):
    """What others send over the same links."""

    model_config = _FROZEN

    source: str
    """The name of the host that it comes from."""

    target: str
    """The name of the host that it goes to."""

    gbps: Rate
    """Its goodput at most, in Gbit/s."""

    start_ms: Moment = 0.0
    """When it begins, counted from the beginning of the replay."""

    end_ms: Moment | None = None
    """When it ends; it lasts to the end of the replay where this is null."""

    connections: int = Field(default=4, ge=1, le=1000)
    """The number of its connections. They share a link with the job's, so both always get a part of the rate."""

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Traffic:
        if self.source == self.target:
            raise ValueError(f"traffic goes from {self.source!r} to itself")
        if self.end_ms is not None and self.end_ms <= self.start_ms:
            raise ValueError("traffic ends before it begins")
        return self


class MessageCost(BaseModel):
    """The cost of messages of one size."""

    model_config = _FROZEN

    size_bytes: int = Field(ge=1, le=10**12)
    """The size of the message."""

    message_us: Latency
    """As ``message_us`` of the algorithm, for this size."""

    message_cpu_us: Latency = 0.0
    """As ``message_cpu_us`` of the algorithm, for this size."""


class AlgorithmCost(BaseModel):
    """What one collective algorithm costs beyond the ideal of its messages."""

    model_config = _FROZEN

    overhead_us: Latency = 0.0
    """The time that each collective takes in addition (launching, waking and joining its workers), by one collective of
    a rank at a time."""

    byte_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """How many times the ideal its bytes take."""

    message_us: Latency = 0.0
    """The time that a message takes in addition to the latency of its link and its bytes, until it is added up and may
    be passed on."""

    message_cpu_us: Latency = 0.0
    """The part of ``message_us`` that is work of the receiver's cores, one message at a time."""

    by_size: tuple[MessageCost, ...] = Field(default=(), max_length=100)
    """The costs of messages where they were measured at several sizes, in the order of sizes (PLogP: Kielmann, Bal,
    Verstoep, 2000)."""

    fit_error: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """By which share measurements deviate from these costs, or may deviate as they varied, averaged over time."""

    @model_validator(mode="after")
    def _sizes_grow(self) -> AlgorithmCost:
        sizes = [each.size_bytes for each in self.by_size]
        if any(before >= after for before, after in pairwise(sizes)):
            raise ValueError("by_size is not in ascending order of size_bytes")
        return self

    def at(self, size_bytes: float) -> AlgorithmCost:
        """The costs for messages of one size, interpolated by its logarithm; beyond the measured sizes the nearest."""
        if not self.by_size:
            return self
        place = bisect_right(self.by_size, size_bytes, key=lambda each: each.size_bytes)
        below, above = self.by_size[max(0, place - 1)], self.by_size[min(place, len(self.by_size) - 1)]
        share = 0.0
        if below is not above:
            share = math.log(size_bytes / below.size_bytes) / math.log(above.size_bytes / below.size_bytes)
        return self.model_copy(
            update={
                "message_us": below.message_us + share * (above.message_us - below.message_us),
                "message_cpu_us": below.message_cpu_us
                + share * (above.message_cpu_us - below.message_cpu_us),
                "by_size": (),
            }
        )

    def crowded(self, times: float) -> AlgorithmCost:
        """The costs if ``times`` as many ranks share the cores, for which messages mostly wait."""
        return self.model_copy(
            update={
                "message_us": self.message_us * times,
                "by_size": tuple(
                    each.model_copy(update={"message_us": each.message_us * times}) for each in self.by_size
                ),
            }
        )


class CodecCost(BaseModel):
    """What computing a codec of gradients takes a rank: before each exchange of a bucket, and behind the last one."""

    model_config = _FROZEN

    bucket_us: tuple[Latency, ...] = Field(min_length=2, max_length=8)
    """What each of these takes by itself, however small the bucket."""

    mib_us: tuple[Latency, ...] = Field(min_length=2, max_length=8)
    """What each of them takes in addition for every MiB of gradients."""

    slowdown: Share = 0.0
    """How much longer training's computation takes meanwhile, on the same cores."""

    @model_validator(mode="after")
    def _as_many(self) -> CodecCost:
        if len(self.bucket_us) != len(self.mib_us):
            raise ValueError("bucket_us and mib_us differ in length")
        return self

    def crowded(self, times: float) -> CodecCost:
        """The cost if ``times`` as many ranks share the cores."""
        return self.model_copy(
            update={
                "bucket_us": tuple(us * times for us in self.bucket_us),
                "mib_us": tuple(us * times for us in self.mib_us),
            }
        )


class PassSlowdown(BaseModel):
    """How much longer a forward and a backward take while collectives are in flight: 0.2 means a fifth longer."""

    model_config = _FROZEN

    forward: Share = 0.0
    """The slowdown of forward."""

    backward: Share = 0.0
    """The slowdown of backward."""


Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class NcclModel(BaseModel):
    """What NCCL knows of GPUs and links when it chooses an algorithm and a protocol, and how far the network is off."""

    model_config = _FROZEN

    architecture: Literal["volta", "ampere", "hopper", "blackwell"] = "hopper"
    """The kind of GPU."""

    cpu: Literal["intel", "amd", "other"] = "intel"
    """Who made the hosts' processors."""

    inside: Literal["nvlink", "pci"] = "nvlink"
    """What joins the GPUs of a host."""

    inside_gb_s: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] = 320.0
    """What NCCL takes a GPU's links to the others of its host for, in one direction, in GB/s."""

    cards_gb_s: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] = 48.0
    """What NCCL takes each network card for, in GB/s: 48 for one of 400 Gbit/s."""

    cards: int = Field(default=0, ge=0, le=4096)
    """The number of network cards of each host; 0 where each worker has one of its own."""

    network_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """How many times as long latencies between hosts are as NCCL takes them to be."""

    tree_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """How many times as long latencies of trees are as NCCL takes them to be, beyond ``network_factor``."""

    scaled: tuple[Factor, Factor] = (1.0, 1.0)
    """By how much what-ifs changed bandwidths and latencies: NCCL may keep what it chose before them."""

    nvls: bool = False
    """Whether switches inside hosts reduce (NVLink SHARP)."""

    version: tuple[int, int] = (2, 27)
    """NCCL's version."""


class Cluster(BaseModel):
    """The hosts of a job and their links. A cluster file holds the same fields."""

    model_config = _FROZEN

    format: Literal[1] = FORMAT
    """The version of this format."""

    hosts: tuple[Host, ...] = Field(min_length=1)
    """The hosts in rank order: the first ``workers`` ranks are on the first host, and so on."""

    server_hosts: tuple[ServerHost, ...] = Field(default=(), max_length=4096)
    """Hosts without workers, which a plan may have for servers."""

    latency_us: Latency = 100.0
    """The latency between two hosts."""

    local_gbps: Rate = 20.0
    """The rate between two workers of one host, in Gbit/s."""

    local_latency_us: Latency = 30.0
    """The latency between two workers of one host."""

    algorithms: dict[str, AlgorithmCost] = {}
    """What collective algorithms, and optimizers on the hosts, cost, by name."""

    codecs: dict[str, CodecCost] = {}
    """What computing codecs of gradients takes, by the names of their costs, for as many workers as these."""

    compute_slowdown: Share = 0.0
    """How much longer computation takes while a collective is in flight on the same cores: 0.2 means a fifth longer. It
    is 0 for devices that do not share their cores with communication."""

    decoupled_slowdown: PassSlowdown | None = None
    """The slowdown of passes under the decoupled all-reduce, which does more on these cores than its collectives; null
    where it was not measured."""

    library: Literal["gloo", "nccl"] = "gloo"
    """The library that carries out a process group's own collectives."""

    nccl: NcclModel | None = None
    """What NCCL's own model of its collectives has to know; without it, collectives of NCCL are taken for rings."""

    sharing: Literal["shared", "queued"] = "shared"
    """How connections use a link: ``shared``, all at once and each with a part of the rate, as with TCP, or ``queued``,
    one message of a host after the other."""

    shared_cores: int | None = Field(default=None, ge=1, le=100_000)
    """The number of cores that all ranks share, if all hosts are on one machine."""

    burst_bytes: int = Field(default=0, ge=0, le=10**9)
    """How much a link that was idle lets through at once, as a token bucket does."""

    window_bytes: int = Field(default=0, ge=0, le=10**9)
    """How much a connection keeps queued at a link that is full. Queues are first come, first served: where others'
    ``traffic`` has a part of a link, it gets that part once it has queued in proportion, and until then a message gets
    more than what is left. With 0 it gets what is left from its first byte on."""

    traffic: tuple[Traffic, ...] = Field(default=(), max_length=10_000)
    """What others send over the same links."""

    paths: tuple[SlowPath, ...] = Field(default=(), max_length=10_000)
    """Ways between two hosts that are slower than their links, or longer, each in one direction."""

    source: str = "written by hand"
    """Where all of this comes from."""

    @field_validator("algorithms", mode="before")
    @classmethod
    def _earlier_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or EARLIER_BACKGROUND_UPDATE not in given:
            return given
        return {
            (BACKGROUND_UPDATE if name == EARLIER_BACKGROUND_UPDATE else name): given[name] for name in given
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        names = [*(host.name for host in self.hosts), *(host.name for host in self.server_hosts)]
        if len(set(names)) != len(names):
            raise ValueError("host names repeat; every host needs a name of its own")
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"all hosts together have {self.world_size} workers, more than {MAX_WORLD_SIZE}")
        known = {host.name for host in self.hosts}
        for what, named in (("traffic", self.traffic), ("paths", self.paths)):
            for name in (name for each in named for name in (each.source, each.target)):
                if name not in known:
                    raise ValueError(f"{what} names an unknown host: {name!r}")
        ways = {(path.source, path.target) for path in self.paths}
        if len(ways) != len(self.paths) or any(source == target for source, target in ways):
            raise ValueError("a path goes from one host to another, and is listed once")
        return self

    @property
    def world_size(self) -> int:
        """The number of workers over all hosts."""
        return sum(host.workers for host in self.hosts)

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """The index of each rank's host."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in range(host.workers))

    @property
    def crowding(self) -> float:
        """The number of ranks per core that they share; 1 if each rank has cores of its own."""
        return 1.0 if self.shared_cores is None else max(1.0, self.world_size / self.shared_cores)

    @property
    def least_latency_us(self) -> float:
        """The latency between two hosts that are nearest to each other."""
        known = [path.latency_us for path in self.paths if path.latency_us is not None]
        return min((self.latency_us, *known))

    def cost_of(self, algorithm: str) -> AlgorithmCost:
        """The measured cost of ``algorithm``, or the ideal if it was not measured."""
        return self.algorithms.get(algorithm, AlgorithmCost())

    @property
    def background_update_us(self) -> float:
        """The overhead of an update on a communication thread: as measured there, otherwise as measured elsewhere."""
        return self.algorithms.get(BACKGROUND_UPDATE, self.cost_of(DEFERRED_UPDATE)).overhead_us

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, host: float = 1.0) -> Cluster:
        """The same cluster with every rate and latency multiplied, between hosts and inside them.

        ``host`` multiplies what optimizers cost the hosts besides their arithmetic. Slowdowns stay: they are shares of
        the time that collectives are in flight. So faster links, which shorten that time, never take more computation.
        """
        own = {
            name: cost.model_copy(update={"overhead_us": cost.overhead_us * host})
            for name, cost in self.algorithms.items()
            if name in HOST_COSTS
        }
        hosts = tuple(
            host.model_copy(
                update={"up_gbps": host.up_gbps * bandwidth, "down_gbps": host.down_gbps * bandwidth}
            )
            for host in self.hosts
        )
        servers = tuple(
            host.model_copy(
                update={"up_gbps": host.up_gbps * bandwidth, "down_gbps": host.down_gbps * bandwidth}
            )
            for host in self.server_hosts
        )
        changed = {
            "hosts": hosts,
            "server_hosts": servers,
            "latency_us": self.latency_us * latency,
            "local_gbps": self.local_gbps * bandwidth,
            "local_latency_us": self.local_latency_us * latency,
            "nccl": self.nccl
            and self.nccl.model_copy(
                update={
                    "inside_gb_s": self.nccl.inside_gb_s * bandwidth,
                    "cards_gb_s": self.nccl.cards_gb_s * bandwidth,
                    "network_factor": self.nccl.network_factor * latency,
                    "scaled": (self.nccl.scaled[0] * bandwidth, self.nccl.scaled[1] * latency),
                }
            ),
            "paths": tuple(path.scaled(bandwidth, latency) for path in self.paths),
            "algorithms": {**self.algorithms, **own},
        }
        return self.model_copy(update=changed)

    def with_server_hosts(self, count: int) -> Cluster:
        """The same with at least ``count`` hosts without workers: those that it has, and others like its first host."""
        there, like = self.server_hosts, self.hosts[0]
        names = {host.name for host in self.hosts} | {host.name for host in there}
        new = (
            name for number in range(1, count + len(names) + 1) if (name := f"server{number}") not in names
        )
        more = [
            ServerHost(name=name, up_gbps=like.up_gbps, down_gbps=like.down_gbps)
            for _, name in zip(range(count - len(there)), new, strict=False)
        ]
        return self.model_copy(update={"server_hosts": (*there, *more)}) if more else self

    def resized(self, world_size: int, workers_a_host: int | None = None) -> Cluster:
        """A cluster of ``world_size`` workers: the hosts repeat in order, the last one may be partly used.

        Each has as many workers as it had, or ``workers_a_host``. If all share the cores of one machine, the more
        workers, the less each gets of them.
        """
        hosts: list[Host] = []
        missing = world_size
        while missing > 0:
            like = self.hosts[len(hosts) % len(self.hosts)]
            workers = min(workers_a_host or like.workers, missing)
            first_round = len(hosts) < len(self.hosts)
            name = like.name if first_round else f"{like.name}+{len(hosts) // len(self.hosts)}"
            hosts.append(like.model_copy(update={"name": name, "workers": workers}))
            missing -= workers
        names = {host.name for host in hosts}
        changed: dict[str, Any] = {
            "hosts": tuple(hosts),
            "traffic": tuple(each for each in self.traffic if {each.source, each.target} <= names),
            "paths": tuple(path for path in self.paths if {path.source, path.target} <= names),
        }
        resized = self.model_copy(update=changed)
        times = resized.crowding / self.crowding
        slower = {name: cost.crowded(times) for name, cost in self.algorithms.items()}
        codecs = {name: cost.crowded(times) for name, cost in self.codecs.items()}
        return resized.model_copy(update={"algorithms": slower, "codecs": codecs})

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file. Raises ClusterError if it is missing, damaged or invalid."""
        what = f"cluster file {path}"
        return files.parse_yaml(
            files.read_text(Path(path), ClusterError, "cluster file"), cls, ClusterError, what
        )

    def save(self, path: str | Path) -> None:
        """Write the cluster as YAML: the complete file or none."""
        files.write_text(Path(path), files.dump_yaml(self.model_dump(mode="json")), ClusterError)


class Ways:
    """What one connection from a host to another gets, by their places in ``cluster``."""

    def __init__(self, cluster: Cluster) -> None:
        places = {host.name: index for index, host in enumerate(cluster.hosts)}
        self._cluster = cluster
        self.paths = {(places[path.source], places[path.target]): path for path in cluster.paths}

    def gbps(self, source: int, target: int) -> float:
        """Its rate, in Gbit/s."""
        if source == target:
            return self._cluster.local_gbps
        links_gbps = min(self._cluster.hosts[source].up_gbps, self._cluster.hosts[target].down_gbps)
        path = self.paths.get((source, target))
        return links_gbps if path is None or path.gbps is None else min(links_gbps, path.gbps)

    def latency_us(self, source: int, target: int) -> float:
        """Its latency."""
        if source == target:
            return self._cluster.local_latency_us
        path = self.paths.get((source, target))
        return self._cluster.latency_us if path is None or path.latency_us is None else path.latency_us

    def message_ns(self, source: int, target: int, size_bytes: float) -> float:
        """How long a message takes by itself."""
        return self.latency_us(source, target) * 1e3 + 8 * size_bytes / self.gbps(source, target)
