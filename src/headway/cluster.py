"""Cluster: a job's hosts, workers and links, measured or written by hand.

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
DEFERRED_UPDATE = "deferred_update"  # the fixed cost of an optimizer step, paid once per bucket
BACKGROUND_UPDATE = "background_update"  # the same on a communication thread that shares cores with training
EARLIER_BACKGROUND_UPDATE = "update_beside"  # its name in cluster files of earlier versions
STEP_CALL = "step_call"  # the cost of optimizer.step() to its caller if the update happens elsewhere
# Costs of the decoupled runtime on the main thread beyond stock DDP: per parameter in a forward, a backward and a step,
# and for copying one MiB of parameters out of buckets.
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
    """A machine without workers, for parameter servers, and the goodput of its link in each direction."""

    model_config = _FROZEN

    name: str = Field(min_length=1, max_length=200)
    """Its name, which no other host has."""

    up_gbps: Rate
    """The rate of its link from the host, in Gbit/s."""

    down_gbps: Rate
    """The rate of its link to the host, in Gbit/s."""


class SlowPath(BaseModel):
    """A path between two hosts, in one direction, that is slower or has more latency than their links."""

    model_config = _FROZEN

    source: str
    """The name of the host that sends."""

    target: str
    """The name of the host that receives."""

    gbps: Rate | None = None
    """The maximum goodput of each connection, in Gbit/s; by default, what the links of both hosts carry."""

    latency_us: Latency | None = None
    """The latency of this path; by default, the cluster's."""

    @model_validator(mode="after")
    def _differs(self) -> SlowPath:
        if self.gbps is None and self.latency_us is None:
            raise ValueError(
                f"the path from {self.source!r} to {self.target!r} has neither gbps nor latency_us"
            )
        return self

    def scaled(self, bandwidth: float, latency: float) -> SlowPath:
        """The path with its rate and latency multiplied."""
        return self.model_copy(
            update={
                "gbps": None if self.gbps is None else self.gbps * bandwidth,
                "latency_us": None if self.latency_us is None else self.latency_us * latency,
            }
        )


class Traffic(BaseModel):
    """Traffic of other jobs over the same links."""

    model_config = _FROZEN

    source: str
    """The name of the host that sends."""

    target: str
    """The name of the host that receives."""

    gbps: Rate
    """Its maximum goodput, in Gbit/s."""

    start_ms: Moment = 0.0
    """When it starts, counted from the start of the replay."""

    end_ms: Moment | None = None
    """When it ends; null means at the end of the replay."""

    connections: int = Field(default=4, ge=1, le=1000)
    """The number of its connections, which share the rate of a link with the job's connections."""

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
    """The cost of a collective algorithm beyond the ideal cost of its messages."""

    model_config = _FROZEN

    overhead_us: Latency = 0.0
    """The extra time of each collective (launching, waking and joining its workers); a rank spends it on one collective
    at a time."""

    byte_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """The time per byte, relative to the ideal."""

    message_us: Latency = 0.0
    """The extra time of a message beyond latency and bytes, until it is reduced and may be forwarded."""

    message_cpu_us: Latency = 0.0
    """The part of ``message_us`` that occupies the receiver's cores, one message at a time."""

    by_size: tuple[MessageCost, ...] = Field(default=(), max_length=100)
    """The costs of messages measured at several sizes, in ascending order of size (PLogP: Kielmann, Bal, Verstoep,
    2000)."""

    fit_error: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """The relative error of these costs: how much measurements deviate from them, or may given their variation, averaged
    over time."""

    @model_validator(mode="after")
    def _sizes_grow(self) -> AlgorithmCost:
        sizes = [cost.size_bytes for cost in self.by_size]
        if any(before >= after for before, after in pairwise(sizes)):
            raise ValueError("by_size is not in ascending order of size_bytes")
        return self

    def at(self, size_bytes: float) -> AlgorithmCost:
        """The costs for messages of one size, interpolated in its logarithm; the nearest beyond measured sizes."""
        if not self.by_size:
            return self
        place = bisect_right(self.by_size, size_bytes, key=lambda cost: cost.size_bytes)
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
        """The costs if ``times`` as many ranks share the cores, on which messages mostly wait."""
        return self.model_copy(
            update={
                "message_us": self.message_us * times,
                "by_size": tuple(
                    cost.model_copy(update={"message_us": cost.message_us * times}) for cost in self.by_size
                ),
            }
        )


class CodecCost(BaseModel):
    """The computation time of a gradient codec on a rank: before each exchange of a bucket, and after the last one."""

    model_config = _FROZEN

    bucket_us: tuple[Latency, ...] = Field(min_length=2, max_length=8)
    """The fixed time of each of these, regardless of the bucket's size."""

    mib_us: tuple[Latency, ...] = Field(min_length=2, max_length=8)
    """The additional time of each of these per MiB of gradients."""

    slowdown: Share = 0.0
    """How much longer training's computation takes meanwhile on the same cores: 0.2 means a fifth longer."""

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
    """The inputs of NCCL's cost model, by which it chooses algorithms and protocols, and corrections for the network."""

    model_config = _FROZEN

    architecture: Literal["volta", "ampere", "hopper", "blackwell"] = "hopper"
    """The kind of GPU."""

    cpu: Literal["intel", "amd", "other"] = "intel"
    """The CPU vendor of the hosts."""

    inside: Literal["nvlink", "pci"] = "nvlink"
    """The interconnect of the GPUs within a host."""

    inside_gb_s: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] = 320.0
    """The bandwidth that NCCL assumes from a GPU to the others of its host, in one direction, in GB/s."""

    cards_gb_s: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] = 48.0
    """The bandwidth that NCCL assumes for each network card, in GB/s: 48 for one of 400 Gbit/s."""

    cards: int = Field(default=0, ge=0, le=4096)
    """The number of network cards per host; 0 if each worker has its own."""

    network_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Latencies between hosts, relative to what NCCL assumes."""

    tree_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    """Latencies of trees, relative to what NCCL assumes, on top of ``network_factor``."""

    scaled: tuple[Factor, Factor] = (1.0, 1.0)
    """The factors by which what-ifs changed bandwidths and latencies; NCCL may keep the choices it made before."""

    nvls: bool = False
    """Whether switches within hosts reduce (NVLink SHARP)."""

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
    """Hosts without workers, which a plan may use for parameter servers."""

    latency_us: Latency = 100.0
    """The latency between two hosts."""

    local_gbps: Rate = 20.0
    """The rate between two workers of one host, in Gbit/s."""

    local_latency_us: Latency = 30.0
    """The latency between two workers of one host."""

    algorithms: dict[str, AlgorithmCost] = {}
    """The costs of collective algorithms, and of optimizers on the hosts, by name."""

    codecs: dict[str, CodecCost] = {}
    """The computation times of gradient codecs by name, for this number of workers."""

    compute_slowdown: Share = 0.0
    """How much longer computation takes while a collective is in flight on the same cores: 0.2 means a fifth longer; 0
    for devices that do not share cores with communication."""

    decoupled_slowdown: PassSlowdown | None = None
    """The slowdown of forward and backward under the decoupled all-reduce, which uses these cores for more than
    collectives; null if not measured."""

    library: Literal["gloo", "nccl"] = "gloo"
    """The library that runs a process group's collectives."""

    nccl: NcclModel | None = None
    """The inputs of NCCL's own cost model; without it, NCCL's collectives are modelled as rings."""

    sharing: Literal["shared", "queued"] = "shared"
    """How connections use a link: ``shared`` (all at once, each with a part of the rate, as with TCP) or ``queued`` (one
    message of a host after the other)."""

    shared_cores: int | None = Field(default=None, ge=1, le=100_000)
    """The number of cores that all ranks share, if all hosts are on one machine."""

    burst_bytes: int = Field(default=0, ge=0, le=10**9)
    """The number of bytes that an idle link lets through at once, like a token bucket."""

    window_bytes: int = Field(default=0, ge=0, le=10**9)
    """The number of bytes that a connection keeps queued at a full link. Queues are first come, first served: ``traffic``
    of others gets its share of a link once it has queued in proportion, and until then a message gets more than the
    rest. With 0, messages get the rest from the first byte on."""

    traffic: tuple[Traffic, ...] = Field(default=(), max_length=10_000)
    """Traffic of other jobs over the same links."""

    paths: tuple[SlowPath, ...] = Field(default=(), max_length=10_000)
    """Paths between two hosts that are slower than their links or have more latency, each in one direction."""

    source: str = "written by hand"
    """Where these values come from."""

    @field_validator("algorithms", mode="before")
    @classmethod
    def _earlier_names(cls, costs: Any) -> Any:
        if not isinstance(costs, Mapping) or EARLIER_BACKGROUND_UPDATE not in costs:
            return costs
        return {
            (BACKGROUND_UPDATE if name == EARLIER_BACKGROUND_UPDATE else name): costs[name] for name in costs
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        names = [*(host.name for host in self.hosts), *(host.name for host in self.server_hosts)]
        if len(set(names)) != len(names):
            raise ValueError("host names repeat; every host needs a unique name")
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"all hosts together have {self.world_size} workers, more than {MAX_WORLD_SIZE}")
        host_names = {host.name for host in self.hosts}
        for what, named in (("traffic", self.traffic), ("paths", self.paths)):
            for name in (name for entry in named for name in (entry.source, entry.target)):
                if name not in host_names:
                    raise ValueError(f"{what} names an unknown host: {name!r}")
        ways = {(path.source, path.target) for path in self.paths}
        if len(ways) != len(self.paths) or any(source == target for source, target in ways):
            raise ValueError("a path must connect two different hosts and be listed once")
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
        """The lowest latency between two hosts."""
        path_latencies_us = [path.latency_us for path in self.paths if path.latency_us is not None]
        return min((self.latency_us, *path_latencies_us))

    def cost_of(self, algorithm: str) -> AlgorithmCost:
        """The measured cost of ``algorithm``, or the ideal if it was not measured."""
        return self.algorithms.get(algorithm, AlgorithmCost())

    @property
    def background_update_us(self) -> float:
        """The overhead of an update on a communication thread; if not measured, that of a deferred update."""
        return self.algorithms.get(BACKGROUND_UPDATE, self.cost_of(DEFERRED_UPDATE)).overhead_us

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, host: float = 1.0) -> Cluster:
        """The cluster with every rate and latency multiplied, between hosts and within them.

        ``host`` multiplies the overheads of optimizers on the hosts. Slowdowns stay: they apply while collectives are in
        flight, which faster links shorten.
        """
        host_costs = {
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
            "algorithms": {**self.algorithms, **host_costs},
        }
        return self.model_copy(update=changed)

    def with_server_hosts(self, count: int) -> Cluster:
        """The cluster with at least ``count`` server hosts: its own, and further ones like its first host."""
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
            "traffic": tuple(flow for flow in self.traffic if {flow.source, flow.target} <= names),
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
    """Rates and latencies of connections between two hosts, given by their indices in ``cluster``."""

    def __init__(self, cluster: Cluster) -> None:
        places = {host.name: index for index, host in enumerate(cluster.hosts)}
        self._cluster = cluster
        self.paths = {(places[path.source], places[path.target]): path for path in cluster.paths}

    def gbps(self, source: int, target: int) -> float:
        """The rate of a connection, in Gbit/s."""
        if source == target:
            return self._cluster.local_gbps
        links_gbps = min(self._cluster.hosts[source].up_gbps, self._cluster.hosts[target].down_gbps)
        path = self.paths.get((source, target))
        return links_gbps if path is None or path.gbps is None else min(links_gbps, path.gbps)

    def latency_us(self, source: int, target: int) -> float:
        """The latency of a connection."""
        if source == target:
            return self._cluster.local_latency_us
        path = self.paths.get((source, target))
        return self._cluster.latency_us if path is None or path.latency_us is None else path.latency_us

    def message_ns(self, source: int, target: int, size_bytes: float) -> float:
        """How long a message takes by itself."""
        return self.latency_us(source, target) * 1e3 + 8 * size_bytes / self.gbps(source, target)
