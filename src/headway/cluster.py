"""Cluster: the hosts of a job, their workers and their links, measured or written by hand.

A link's cost is the alpha-beta model: a message of ``n`` bytes takes ``latency + n / rate``. Every host
has one link with two directions (``up`` and ``down``) that all of its workers share; workers of one host
talk over memory.
Rates are goodput, payload bits a second, not the nominal rate of the wire.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway import files
from headway.errors import ClusterError

FORMAT: Literal[1] = 1
MAX_WORLD_SIZE = 100_000

# Costs beside those of collectives that a cluster may hold.
DEFERRED_UPDATE = "deferred_update"  # what an optimizer's step costs by itself, paid once a bucket
UPDATE_BESIDE = "update_beside"  # the same on a communication thread, which has to share cores with training
STEP_CALL = "step_call"  # what optimizer.step() costs its caller where the update happens elsewhere
# What the decoupled runtime costs the main thread beside stock DDP: each parameter in a forward, a backward and a step,
# and copying one MiB of parameters out of buckets.
RUNTIME_FORWARD, RUNTIME_BACKWARD, RUNTIME_STEP = "runtime_forward", "runtime_backward", "runtime_step"
COPY_MIB = "copy_mib"
RUNTIME_COSTS = (RUNTIME_FORWARD, RUNTIME_BACKWARD, RUNTIME_STEP, COPY_MIB)
HOST_COSTS = (DEFERRED_UPDATE, UPDATE_BESIDE, STEP_CALL, *RUNTIME_COSTS)

Rate = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # up to a quarter of an hour
Share = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Moment = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Host(BaseModel):
    """One machine: its workers and the goodput of its link in each direction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=200)
    workers: int = Field(ge=1, le=4096)
    up_gbps: Rate
    down_gbps: Rate


class Traffic(BaseModel):
    """What others send from the host ``source`` to the host ``target``: ``gbps`` of goodput, at most.

    It begins ``start_ms`` after the beginning of what is replayed, and goes on for good where ``end_ms`` is None. Its
    ``connections`` share a link with the job's, so that something is left for both however much is asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    target: str
    gbps: Rate
    start_ms: Moment = 0.0
    end_ms: Moment | None = None
    connections: int = Field(default=4, ge=1, le=1000)

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Traffic:
        if self.source == self.target:
            raise ValueError(f"traffic goes from {self.source!r} to itself")
        if self.end_ms is not None and self.end_ms <= self.start_ms:
            raise ValueError("traffic ends before it begins")
        return self


class MessageCost(BaseModel):
    """What a message of ``size_bytes`` takes by an algorithm: ``AlgorithmCost.message_us`` and ``message_cpu_us``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: int = Field(ge=1, le=10**12)
    message_us: Latency
    message_cpu_us: Latency = 0.0


class AlgorithmCost(BaseModel):
    """What one collective algorithm costs beyond the ideal of its messages.

    ``overhead_us`` is paid once a collective (launching, waking and joining its workers), by one collective of a rank
    at a time; ``byte_factor`` is how many times the ideal its bytes take. ``message_us`` is how long a message
    takes, besides the latency of its link and its bytes, until it is added up and may be passed on; of that
    ``message_cpu_us`` are work of the receiver's cores, one message at a time. Where both were measured at several
    sizes, ``by_size`` has them, in the order of sizes (PLogP: Kielmann, Bal, Verstoep, 2000).
    ``fit_error`` is by how much what was measured is off these costs, or may be as it varied, in the mean over time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    overhead_us: Latency = 0.0
    byte_factor: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    message_us: Latency = 0.0
    message_cpu_us: Latency = 0.0
    by_size: tuple[MessageCost, ...] = Field(default=(), max_length=100)
    fit_error: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0

    @model_validator(mode="after")
    def _sizes_grow(self) -> AlgorithmCost:
        sizes = [each.size_bytes for each in self.by_size]
        if any(before >= after for before, after in pairwise(sizes)):
            raise ValueError("by_size is not in the order of sizes")
        return self

    def at(self, size_bytes: float) -> AlgorithmCost:
        """The same for messages of one size: by the logarithm between two measured ones, beyond them the nearest."""
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
        """The same where so many times as many ranks share the cores, for which messages mostly wait."""
        return self.model_copy(
            update={
                "message_us": self.message_us * times,
                "by_size": tuple(
                    each.model_copy(update={"message_us": each.message_us * times}) for each in self.by_size
                ),
            }
        )


class PassSlowdown(BaseModel):
    """How much longer a forward and a backward take for as long as collectives are in flight, as shares."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    forward: Share = 0.0
    backward: Share = 0.0

    def times(self, factor: float) -> PassSlowdown:
        """So many times as much."""
        return PassSlowdown(forward=self.forward * factor, backward=self.backward * factor)


class Cluster(BaseModel):
    """Hosts in rank order: the first ``hosts[0].workers`` ranks live on the first host, and so on.

    ``compute_slowdown`` is how much longer computation takes while a collective is under way on the same cores (0.2
    stands for a fifth longer). It is 0 for devices that compute by themselves.
    ``decoupled_slowdown`` is that of passes under the decoupled all-reduce, which does more on these cores than its
    collectives; None where it is not known apart.

    ``library`` is whose collectives a process group's own are. ``sharing`` says how connections get on on a link:
    "shared", all at once and each with a part of the rate, as TCP does, or "queued", one message of a host after
    the other. ``shared_cores`` is how many cores all ranks share, where the hosts are one machine's. ``burst_bytes``
    is what a link that was idle lets through at once, as one that a token bucket shapes. ``traffic`` is what others
    send over the same links.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    hosts: tuple[Host, ...] = Field(min_length=1)
    latency_us: Latency = 100.0
    local_gbps: Rate = 20.0
    local_latency_us: Latency = 30.0
    algorithms: dict[str, AlgorithmCost] = {}
    compute_slowdown: Share = 0.0
    decoupled_slowdown: PassSlowdown | None = None
    library: Literal["gloo", "nccl"] = "gloo"
    sharing: Literal["shared", "queued"] = "shared"
    shared_cores: int | None = Field(default=None, ge=1, le=100_000)
    burst_bytes: int = Field(default=0, ge=0, le=10**9)
    traffic: tuple[Traffic, ...] = Field(default=(), max_length=10_000)
    source: str = "written by hand"

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        if len({host.name for host in self.hosts}) != len(self.hosts):
            raise ValueError("host names repeat; every host needs a name of its own")
        if self.world_size > MAX_WORLD_SIZE:
            raise ValueError(f"all hosts together have {self.world_size} workers, more than {MAX_WORLD_SIZE}")
        known = {host.name for host in self.hosts}
        for name in (name for each in self.traffic for name in (each.source, each.target)):
            if name not in known:
                raise ValueError(f"traffic names a host that is not there: {name!r}")
        return self

    @property
    def world_size(self) -> int:
        """The number of workers over all hosts."""
        return sum(host.workers for host in self.hosts)

    @property
    def host_of_rank(self) -> tuple[int, ...]:
        """For each rank, the index of its host."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in range(host.workers))

    @property
    def crowding(self) -> float:
        """How many ranks there are for a core that they share; 1 where each has cores of its own."""
        return 1.0 if self.shared_cores is None else max(1.0, self.world_size / self.shared_cores)

    def cost_of(self, algorithm: str) -> AlgorithmCost:
        """The measured cost of ``algorithm``, or the ideal where nobody measured it."""
        return self.algorithms.get(algorithm, AlgorithmCost())

    @property
    def update_beside_us(self) -> float:
        """What an update on a communication thread costs by itself: what was measured there, or else elsewhere."""
        return self.algorithms.get(UPDATE_BESIDE, self.cost_of(DEFERRED_UPDATE)).overhead_us

    def scaled(self, *, bandwidth: float = 1.0, latency: float = 1.0, host: float = 1.0) -> Cluster:
        """The same cluster with every rate and latency multiplied, between hosts and inside them.

        ``host`` multiplies what optimizers cost the hosts beside their arithmetic.
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
        changed = {
            "hosts": hosts,
            "latency_us": self.latency_us * latency,
            "local_gbps": self.local_gbps * bandwidth,
            "local_latency_us": self.local_latency_us * latency,
            "algorithms": {**self.algorithms, **own},
            # The cores work for every byte, so more bytes a second take more of them.
            "compute_slowdown": self.compute_slowdown * bandwidth,
            "decoupled_slowdown": self.decoupled_slowdown and self.decoupled_slowdown.times(bandwidth),
        }
        return self.model_copy(update=changed)

    def resized(self, world_size: int, workers_a_host: int | None = None) -> Cluster:
        """A cluster of ``world_size`` workers: the hosts repeat in order, the last one may be partly used.

        Each has as many workers as it had, or ``workers_a_host``. Where all share the cores of one machine, more of
        them get less of it each.
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
        }
        resized = self.model_copy(update=changed)
        times = resized.crowding / self.crowding
        slower = {name: cost.crowded(times) for name, cost in self.algorithms.items()}
        return resized.model_copy(update={"algorithms": slower})

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file. Raises ClusterError where it is missing, damaged or does not validate."""
        what = f"cluster file {path}"
        return files.parse_yaml(
            files.read_text(Path(path), ClusterError, "cluster file"), cls, ClusterError, what
        )

    def save(self, path: str | Path) -> None:
        """Write the cluster as YAML, whole or not at all."""
        files.write_text(Path(path), files.dump_yaml(self.model_dump(mode="json")), ClusterError)
