"""Jobs, clusters and plans by chance: what the bound has to hold for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from headway.bound import Form
from headway.cluster import AlgorithmCost, Cluster, Host, SlowPath, Traffic
from headway.collectives.algorithms import ALGORITHMS, FOR_HALVES
from headway.collectives.hierarchical import Hosts
from headway.collectives.selection import SizeClass
from headway.compression.cast import Cast
from headway.compression.int8 import Int8
from headway.compression.top_k import TopK
from headway.errors import PlanError
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.graph.step_layout import StepProfile
from headway.job import Job
from headway.model import ModelSpec, ParameterSpec
from headway.scheduling.buckets import GATHER_MODES
from headway.strategies.base import Strategy
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.parameter_server.policy import ParameterServerStrategy
from headway.trace.events import Read

MS = 1_000_000


@dataclass(frozen=True)
class Drawn:
    """A job, and plans for it, each with the form that it is of."""

    job: Job
    plans: tuple[tuple[Form, Strategy], ...]


@st.composite
def drawn(draw: st.DrawFn, *, ranks_differ: bool = False, steps_differ: bool = False) -> Drawn:
    """A job on a cluster that may be mixed, with bursts and other tenants, and one plan of each kind.

    Its ranks compute at speeds of their own where ``ranks_differ``, its steps where ``steps_differ``; and then maybe
    only some of them read gradients.
    """
    model = draw(models())
    computation_ms = draw(st.sampled_from([5, 20, 80]))
    cluster = draw(clusters(model.size_bytes, computation_ms))
    profile = draw(profiles(model, computation_ms * MS))
    ranks, steps = cluster.world_size if ranks_differ else 1, draw(st.sampled_from([1, 2, 4]))
    speeds = st.sampled_from([0.7, 1.0, 1.1, 1.5])
    rank_speeds = [draw(speeds) if ranks_differ else 1.0 for _ in range(ranks)]
    read_ns = draw(st.sampled_from([0, 0, 0, MS]))
    every = set(range(steps))
    some = st.sampled_from([{0}, {steps - 1}, every])
    reads_in = draw(some) if steps_differ else every
    looks_in = draw(st.just(set()) | some) if steps_differ else set()
    timelines = {
        rank: tuple(
            _with_reads(
                profile.timeline(rank, step), read_ns * (step in reads_in), looks=step in looks_in
            ).scaled(speed * (draw(speeds) if steps_differ else 1.0))
            for step in range(steps)
        )
        for rank, speed in enumerate(rank_speeds)
    }
    computation = Computation(
        timelines, draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1.0, 1.0, 0.5]))
    )
    job = Job((model,), cluster.world_size, cluster, computation)
    return Drawn(job, tuple(draw(plans(job))))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Up to eight modules with a parameter or two each; orders are set by ``profiles``."""
    numels = st.sampled_from([1, 1000, 20_000, 300_000, 2_000_000])
    parameters = tuple(
        ParameterSpec(name=f"m{index}.{kind}", shape=(draw(numels),), dtype="float32", module=f"m{index}")
        for index in range(draw(st.integers(1, 6)))
        for kind in draw(st.sampled_from([("weight",), ("weight", "bias")]))
    )
    modules = dict.fromkeys(parameter.module for parameter in parameters)
    ready = tuple(parameter.name for parameter in reversed(parameters))
    return ModelSpec(parameters=parameters, forward_order=tuple(modules), ready_order=ready)


@st.composite
def profiles(draw: st.DrawFn, model: ModelSpec, computation_ns: int) -> StepProfile:
    """A step whose modules take times by chance; some are not used by forward."""
    shares = st.integers(0, 10)
    own = {module: (draw(shares), draw(shares)) for module in model.forward_order}
    total = max(1, sum(map(sum, own.values())))
    needs_ns: dict[str, int] = {}
    ready_ns: dict[str, int] = {}
    now_ns = 0
    for module in model.forward_order:
        if draw(st.integers(0, 9)):
            needs_ns[module] = now_ns
        now_ns += own[module][0] * computation_ns // total
    forward_ns, now_ns = now_ns, 0
    for module in reversed(model.forward_order):
        now_ns += own[module][1] * computation_ns // total
        ready_ns |= {p.name: now_ns for p in model.parameters if p.module == module}
    between, tail, rest, optimizer = (draw(st.sampled_from([0, 0, MS, 5 * MS])) for _ in range(4))
    return StepProfile(forward_ns, now_ns + 1000, needs_ns, ready_ns, between, tail, rest, optimizer)


def _with_reads(timeline: Timeline, read_ns: int, *, looks: bool) -> Timeline:
    """The same where the script reads all gradients before the optimizer's step, or ``looks`` at parameters behind."""
    items = timeline.items
    if read_ns:
        place = next(index for index, item in enumerate(items) if item.kind == "step")
        items = (*items[:place], Item(Part.READ, "grad", read_ns), *items[place:])
    if looks:
        items = (*items, Item(Part.READ, Read.VALUES, MS))
    return Timeline(timeline.rank, timeline.step, items)


@st.composite
def clusters(draw: st.DrawFn, size_bytes: int, computation_ms: float) -> Cluster:
    """Two to a dozen workers whose links need from a tenth to thrice the computation for one way of all bytes."""
    ratio = draw(st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    gbps = max(1e-4, size_bytes * 8e-6 / (computation_ms * ratio))
    factors = st.sampled_from([0.5, 1.0, 2.0]) if draw(st.booleans()) else st.just(1.0)
    workers = draw(st.sampled_from([1, 1, 1, 2, 3]))
    fewer = workers if draw(st.booleans()) else 1
    hosts = [
        Host(
            name=f"host{index}", workers=draw(st.sampled_from([workers, workers, fewer])),
            up_gbps=gbps * draw(factors), down_gbps=gbps * draw(factors),
        )
        for index in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    if len(hosts) == 1:
        hosts = [hosts[0].model_copy(update={"workers": draw(st.integers(2, 4))})]
    given: dict[str, Any] = {}
    if len(hosts) > 1 and draw(st.booleans()):
        given["traffic"] = (
            Traffic(source="host0", target="host1", gbps=gbps * draw(st.sampled_from([0.2, 0.7, 3.0]))),
        )
        given["window_bytes"] = int(size_bytes * draw(st.sampled_from([0, 0.01, 0.2])))
    if len(hosts) > 1 and draw(st.integers(0, 4)) == 0:
        latency_us = draw(st.sampled_from([None, 0, 500, 9000]))
        given["paths"] = (SlowPath(source="host1", target="host0", gbps=gbps / 3, latency_us=latency_us),)
    costs = st.sampled_from(
        [AlgorithmCost(), AlgorithmCost(byte_factor=0.9), AlgorithmCost(overhead_us=300, message_us=50)]
    )
    return Cluster(
        hosts=tuple(hosts),
        latency_us=draw(st.sampled_from([0, 0, 100, 3000])),
        local_gbps=gbps * draw(st.sampled_from([0.2, 1.0, 8.0])),
        local_latency_us=draw(st.sampled_from([0, 30])),
        algorithms={"ring": draw(costs), "gloo_all_reduce": draw(costs), "servers": draw(costs)},
        library=draw(st.sampled_from(["gloo", "gloo", "nccl"])),
        sharing=draw(st.sampled_from(["shared", "shared", "queued"])),
        burst_bytes=min(10**9, int(size_bytes * draw(st.sampled_from([0, 0.001, 0.02, 0.1, 0.5, 1, 3, 20])))),
        compute_slowdown=draw(st.sampled_from([0.0, 0.0, 0.3])),
        **given,
    )


@st.composite
def plans(draw: st.DrawFn, job: Job) -> Sequence[tuple[Form, Strategy]]:
    """Plans of DDP, one of servers, and one of each form of the decoupled all-reduce; some compress gradients."""
    caps = st.sampled_from([0.03, 0.2, 0.5, 1.1]).map(lambda share: math.ceil(job.model.size_bytes * share))
    channels = st.integers(1, 3)
    hosts = Hosts.of_cluster(job.on)
    codecs = st.none() | st.sampled_from([Cast(dtype="bfloat16"), Int8(), TopK()])
    wire = st.just(()) | st.tuples(codecs) | st.tuples(codecs, codecs)
    orders = st.just(()) | st.permutations(range(job.world_size)).map(tuple)
    found: list[tuple[Form, Strategy]] = [
        ("all-reduce", DistributedDataParallelStrategy(bucket_cap_mb=draw(caps) / 2**20, wire=draw(wire))),
        (
            "all-reduce",
            DistributedDataParallelStrategy(bucket_caps_mb=tuple(draw(caps) / 2**20 for _ in range(3))),
        ),
    ]
    if job.on.library == "gloo":
        parts = st.lists(st.integers(1, 20), min_size=job.world_size, max_size=job.world_size)
        servers = ParameterServerStrategy(
            bucket_cap_mb=draw(caps) / 2**20,
            channels=draw(channels),
            shares=draw(st.just(()) | parts.map(tuple)),
            pieces=draw(st.sampled_from([1, 3])),
        )
        found.append(("all-reduce", servers))
    for gather in GATHER_MODES:
        named = st.sampled_from([name for name in FOR_HALVES if _can_be_had(name, hosts)])
        decoupled = DecoupledStrategy(
            bucket_cap_bytes=draw(caps), gather=gather, channels=draw(channels),
            reduce_scatter=draw(named), all_gather=draw(named), by_size=draw(classes(named, job.model.size_bytes)),
            ring_order=draw(orders), wire=draw(st.none() | st.just(Cast(dtype="bfloat16"))),
        ).spelled_out(job)  # fmt: skip
        if gather == "gradients" and draw(st.booleans()):  # as early as may be
            decoupled = decoupled.model_copy(update={"gathers_after": decoupled.gather_order})
        found.append((gather, decoupled))
    return found


def classes(named: st.SearchStrategy[str], size_bytes: int) -> st.SearchStrategy[tuple[SizeClass, ...]]:
    """None, or other algorithms of buckets of up to a tenth of all bytes."""
    most = max(1, size_bytes // 10)
    one = st.builds(SizeClass, size_bytes=st.just(most), reduce_scatter=named, all_gather=named)
    return st.just(()) | st.tuples(one)


def _can_be_had(algorithm: str, hosts: Hosts) -> bool:
    try:
        ALGORITHMS[algorithm].check(hosts)
    except PlanError:
        return False
    return True
