"""Jobs on NCCL of which everything is known: played on streams of their own, and written as the profiler would.

A rank is a programme of computation and collectives. A collective's kernel begins on each rank when that rank's stream
comes to it, and all of them end together, a transfer after the last has begun. Nothing here is Headway's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

BASE_NS = 1_700_000_000_000_000_000
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce_scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_to_all": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
CALLED = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv", "send": "send", "recv": "recv",
}  # fmt: skip


@dataclass(frozen=True)
class Compute:
    """Computation on the main stream."""

    ms: float
    phase: str


@dataclass(frozen=True)
class Ask:
    """A collective of ``group`` on a stream of its own, after what was computed; the main stream ``waits`` or not."""

    group: str
    name: str
    size_bytes: int
    phase: str
    waits: bool = False
    key: str = ""  # by which ``Await`` names it
    peer: int = -1


@dataclass(frozen=True)
class Await:
    """The main stream waits for what was asked for under ``key``."""

    key: str


Operation = Compute | Ask | Await


@dataclass
class Job:
    """``programmes`` of each rank for one step; ``groups`` are the ranks of each group, ``gbps`` what its rings reach.

    ``slow`` multiplies one rank's computation. ``offsets_us`` are hosts' clocks.
    """

    kind: str
    programmes: list[list[Operation]]
    groups: dict[str, tuple[int, ...]]
    gbps: dict[str, float]
    hosts: list[str]
    steps: int = 6
    slow: dict[int, float] = field(default_factory=dict)
    offsets_us: dict[str, float] = field(default_factory=dict)
    drifts_ppm: dict[str, float] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    noise: float = 0.005
    seed: int = 0
    missing: tuple[int, ...] = ()
    names: Callable[[int, str], str] = lambda rank, group: group  # what a rank calls a group


@dataclass
class Kernel:
    """What a stream did: of a collective also when all of its members had begun."""

    rank: int
    step: int
    operation: Compute | Ask
    start_us: float
    end_us: float
    order: int
    sequence: int = -1
    all_there_us: float = 0.0


@dataclass
class Played:
    """What happened: every kernel, and when each rank's main stream waited, with the collective that it waited for."""

    kernels: list[Kernel]
    waits: list[tuple[int, int, float, float, Kernel]]  # rank, step, from, until, what for
    step_ms: float

    def exposed_ms(self, rank: int, steps: int) -> float:
        """How long a rank waits in a step for what all members have begun."""
        waited = sum(until - begin for of, _, begin, until, _ in self.waits if of == rank)
        return waited / steps / 1e3 - self.late_ms(rank, steps)

    def late_ms(self, rank: int, steps: int) -> float:
        """How long a rank waits in a step for members that have not begun, while nothing is under way for it."""
        busy = sorted(
            (one.all_there_us, one.end_us) for one in self.kernels if one.rank == rank and one.sequence >= 0
        )
        waited = 0.0
        for of, _, begin, until, kernel in self.waits:
            if of == rank:
                end = max(begin, min(until, kernel.all_there_us))
                waited += end - begin - covered(busy, begin, end)
        return waited / steps / 1e3


def covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How much of a stretch lies in sorted spans, which may overlap."""
    total, at = 0.0, begin
    for first, last in spans:
        if last > at and first < end:
            total += max(0.0, min(last, end) - max(first, at))
            at = max(at, min(last, end))
    return total


def took_us(job: Job, ask: Ask) -> float:
    """How long a collective takes once all are there: a ring's messages at the rate of its group."""
    members = len(job.groups[ask.group])
    factor = 2 if ask.name == "all_reduce" else 1
    share = 1.0 if ask.name in ("send", "recv") else factor * (members - 1) / members
    return 15.0 + ask.size_bytes * 8 * share / job.gbps[ask.group] / 1e3


def play(job: Job, *, slow: bool = True, communication: float = 1.0) -> Played:
    """Play all steps. ``slow`` of False has all ranks alike; ``communication`` multiplies its time."""
    world = len(job.programmes)
    generator = random.Random(job.seed)
    lengths = [
        [
            [
                operation.ms * 1e3 * max(0.5, generator.gauss(1, job.noise))
                * (job.slow.get(rank, 1.0) if slow and operation.phase != OPTIMIZER else 1.0)
                if isinstance(operation, Compute) else 0.0
                for operation in job.programmes[rank]
            ]
            for _ in range(job.steps)
        ]
        for rank in range(world)
    ]  # fmt: skip
    kernels: list[Kernel] = []
    waits: list[tuple[int, int, float, float, Kernel]] = []
    cursor, now = [0] * world, [0.0] * world
    stream_us: dict[tuple[int, str], float] = {}
    asked: dict[tuple[str, int], dict[int, Kernel]] = {}
    counted: dict[tuple[int, str], int] = {}
    pending: list[dict[str, Kernel]] = [{} for _ in range(world)]
    waiting: list[Kernel | None] = [None] * world
    ends: list[list[float]] = [[0.0] for _ in range(world)]
    unresolved: dict[tuple[int, str], list[Kernel]] = {}
    order = 0

    def resolve() -> bool:
        found = False
        for (group, sequence), members in list(asked.items()):
            if len(members) < len(job.groups[group]):
                continue
            if any(unresolved[kernel.rank, group][0] is not kernel for kernel in members.values()):
                continue
            for kernel in members.values():
                kernel.start_us = max(kernel.start_us, stream_us.get((kernel.rank, group), 0.0))
            there_us = max(kernel.start_us for kernel in members.values())
            ask = next(iter(members.values())).operation
            assert isinstance(ask, Ask)
            until_us = there_us + communication * took_us(job, ask)
            for kernel in members.values():
                kernel.end_us = until_us + abs(generator.gauss(0, 1.5))
                kernel.all_there_us = there_us
                stream_us[kernel.rank, group] = kernel.end_us
                unresolved[kernel.rank, group].pop(0)
            del asked[group, sequence]
            found = True
        return found

    while any(position < job.steps * len(job.programmes[rank]) for rank, position in enumerate(cursor)):
        moved = False
        for rank in range(world):
            programme = job.programmes[rank]
            while cursor[rank] < job.steps * len(programme):
                step, place = divmod(cursor[rank], len(programme))
                operation = programme[place]
                blocked = waiting[rank]
                if blocked is not None:
                    if blocked.end_us == 0.0:  # not yet known
                        break
                    if blocked.end_us > now[rank]:
                        waits.append((rank, step, now[rank], blocked.end_us, blocked))
                    now[rank] = max(now[rank], blocked.end_us)
                    waiting[rank] = None
                    continue
                if isinstance(operation, Compute):
                    length = lengths[rank][step][place]
                    kernels.append(Kernel(rank, step, operation, now[rank], now[rank] + length, order))
                    now[rank] += length
                elif isinstance(operation, Ask):
                    number = counted.get((rank, operation.group), 0)
                    counted[rank, operation.group] = number + 1
                    kernel = Kernel(rank, step, operation, now[rank], 0.0, order, number)
                    kernels.append(kernel)
                    asked.setdefault((operation.group, number), {})[rank] = kernel
                    unresolved.setdefault((rank, operation.group), []).append(kernel)
                    pending[rank][operation.key] = kernel
                    if operation.waits:
                        waiting[rank] = kernel
                else:
                    waiting[rank] = pending[rank][operation.key]
                order += 1
                cursor[rank] += 1
                moved = True
                if cursor[rank] % len(programme) == 0:
                    ends[rank].append(now[rank])
        moved |= resolve()
        assert moved, "the programmes wait for each other in a circle"
    mean_us = sum(own[-1] for own in ends) / world / job.steps
    return Played(kernels, waits, mean_us / 1e3)


def documents(job: Job, played: Played) -> dict[str, bytes]:
    """A Kineto document for each rank that is not missing, by its file's name."""
    world = len(job.programmes)
    return {
        f"rank{rank}.json": json.dumps(_document(job, played, rank)).encode()
        for rank in range(world)
        if rank not in job.missing
    }


def _document(job: Job, played: Played, rank: int) -> dict[str, Any]:
    own = sorted((kernel for kernel in played.kernels if kernel.rank == rank), key=lambda one: one.order)
    host = job.hosts[rank]
    offset_us, drift = job.offsets_us.get(host, 0.0), job.drifts_ppm.get(host, 0.0) * 1e-6

    def at(us: float) -> float:
        return round(1e5 + offset_us + us * (1 + drift), 3)

    events: list[dict[str, Any]] = []
    until_us = -1e3
    for step in range(job.steps):
        mine = [kernel for kernel in own if kernel.step == step]
        begin_us = max(until_us, min(kernel.start_us for kernel in mine) - 20 - 6 * len(mine))
        events.append(_span("user_annotation", f"ProfilerStep#{step}", at(begin_us), 6 * len(mine) + 10))
        for place, kernel in enumerate(mine):
            events += _launched(job, kernel, at, begin_us + 2 + 6 * place, len(events))
        until_us = begin_us + 6 * len(mine) + 10
    world = len(job.programmes)
    config = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))}] + [
        {"pg_name": job.names(rank, name), "pg_desc": job.descriptions.get(name, "undefined"), "pg_size": len(ranks),
         "ranks": list(ranks)}
        for name, ranks in job.groups.items() if rank in ranks
    ]  # fmt: skip
    return {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "host_name": host,
        "baseTimeNanoseconds": BASE_NS, "traceEvents": events,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config},
    }  # fmt: skip


def _launched(
    job: Job, kernel: Kernel, at: Callable[[float], float], launch_us: float, number: int
) -> Iterator[dict[str, Any]]:
    operation = kernel.operation
    phase = operation.phase
    tid = 200 if phase == BACKWARD else 100
    around = {
        FORWARD: ("cpu_op", "aten::mm"),
        BACKWARD: ("cpu_op", "autograd::engine::evaluate_function: MmBackward0"),
        OPTIMIZER: ("user_annotation", "Optimizer.step#AdamW.step"),
    }[phase]
    yield _span(*around, at(launch_us), 5, tid=tid)
    args: dict[str, Any] = {"correlation": number}
    name, stream = f"gemm_{phase}", 7
    if isinstance(operation, Ask):
        ranks = job.groups[operation.group]
        stream = 20 + sorted(job.groups).index(operation.group)
        name = KERNELS[operation.name]
        said = {
            "Collective name": CALLED[operation.name], "dtype": "BFloat16", "Group size": len(ranks),
            "In msg nelems": operation.size_bytes // 2, "Out msg nelems": operation.size_bytes // 2,
            "Process Group Name": job.names(kernel.rank, operation.group), "Process Group Ranks": str(list(ranks)),
            "Seq": kernel.sequence,
        }  # fmt: skip
        if operation.name in ("send", "recv"):
            said |= {"Src Rank": operation.peer, "Dst Rank": operation.peer}
        args |= said
        yield _span("cpu_op", "record_param_comms", at(launch_us + 1), 3, tid=tid, **said)
    yield _span("cuda_runtime", "cudaLaunchKernel", at(launch_us + 1.5), 1, tid=tid, correlation=number)
    yield {
        **_span("kernel", name, at(kernel.start_us), 0, tid=stream, **args), "pid": 0,
        "dur": round(at(kernel.end_us) - at(kernel.start_us), 3),
    }  # fmt: skip


def _span(cat: str, name: str, ts: float, dur: float, *, tid: int = 100, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


# What jobs do in a step.


def data_parallel(
    draw: random.Random, *, layers: int, layer_ms: float, group: str, buckets: int, bucket_bytes: int
) -> tuple[list[Operation], list[Operation]]:
    """Forward, and backward with buckets that are asked for as it goes on, awaited at its end."""
    forward: list[Operation] = [Compute(layer_ms, FORWARD) for _ in range(layers)]
    backward: list[Operation] = []
    keys = []
    for layer in range(layers):
        backward.append(Compute(2 * layer_ms, BACKWARD))
        if (layer + 1) * buckets // layers > layer * buckets // layers:
            keys.append(f"{group} {layer}")
            backward.append(Ask(group, "all_reduce", bucket_bytes, BACKWARD, key=keys[-1]))
    return forward, backward + [Await(key) for key in keys]


def blocking_layers(
    operations: Sequence[Operation], group: str, name: str, size_bytes: int
) -> list[Operation]:
    """The same with a collective after each layer, for which the next one waits."""
    made: list[Operation] = []
    for operation in operations:
        made.append(operation)
        if isinstance(operation, Compute):
            made.append(Ask(group, name, size_bytes, operation.phase, waits=True))
    return made


def one_forward_one_backward(
    rank: int, stages: int, columns: int, micro_batches: int, layer_ms: float, size_bytes: int
) -> list[Operation]:
    """The schedule 1F1B of a rank: its stage is ``rank // columns``, and its neighbours are ``columns`` away."""
    stage = rank // columns
    before, after = rank - columns, rank + columns
    made: list[Operation] = []

    def forward() -> None:
        if stage:
            made.append(Ask(f"f{before}", "recv", size_bytes, FORWARD, waits=True, peer=before))
        made.append(Compute(layer_ms, FORWARD))
        if stage + 1 < stages:
            made.append(Ask(f"f{rank}", "send", size_bytes, FORWARD, peer=after))

    def backward() -> None:
        if stage + 1 < stages:
            made.append(Ask(f"b{rank}", "recv", size_bytes, BACKWARD, waits=True, peer=after))
        made.append(Compute(2 * layer_ms, BACKWARD))
        if stage:
            made.append(Ask(f"b{before}", "send", size_bytes, BACKWARD, peer=before))

    warm_up = min(stages - stage - 1, micro_batches)
    for _ in range(warm_up):
        forward()
    for _ in range(micro_batches - warm_up):
        forward()
        backward()
    for _ in range(warm_up):
        backward()
    return made


def random_job(kind: str, seed: int) -> Job:
    """A job of ``kind`` with random sizes, rates, clocks, a straggler or none, and ranks that are missing or none."""
    draw = random.Random(f"{kind} {seed}")
    layers, layer_ms = draw.randint(4, 8), draw.uniform(1.0, 6.0)
    computation_ms = 3 * layers * layer_ms
    hosts_count, a_host = draw.choice([(1, 4), (2, 2), (2, 4), (4, 2)])
    world = hosts_count * a_host
    hosts = [f"h{rank // a_host}" for rank in range(world)]
    share = draw.choice([0.05, 0.2, 0.5, 1.0])  # of the computation that communication takes
    everybody = tuple(range(world))
    inside = {f"in{h}": tuple(range(h * a_host, (h + 1) * a_host)) for h in range(hosts_count)}
    across = {f"across{k}": tuple(range(k, world, a_host)) for k in range(a_host)}
    gbps = draw.choice([25.0, 100.0, 400.0])
    optimizer = Compute(draw.uniform(0.5, 3.0), OPTIMIZER)

    def sized(total_share: float, count: int, members: int, factor: int = 2) -> int:
        each_us = total_share * computation_ms * 1e3 / count
        return max(2048, int(each_us * 1e3 * gbps / 8 / (factor * (members - 1) / members)) // 2048 * 2048)

    groups: dict[str, tuple[int, ...]] = {}
    descriptions: dict[str, str] = {}
    programmes: list[list[Operation]] = []
    if kind == "ddp":
        groups = {"dp": everybody}
        buckets = draw.randint(1, 4)
        for _ in range(world):
            forward, backward = data_parallel(
                draw, layers=layers, layer_ms=layer_ms, group="dp", buckets=buckets,
                bucket_bytes=sized(share, buckets, world),
            )  # fmt: skip
            programmes.append([*forward, *backward, optimizer])
    elif kind in ("tp", "moe"):
        groups = dict(inside) | (across if hosts_count > 1 else {})
        name = "all_reduce" if kind == "tp" else "all_to_all"
        size = sized(share, 2 * layers, a_host, 2 if kind == "tp" else 1)
        for rank in everybody:
            dp = f"across{rank % a_host}" if hosts_count > 1 else ""
            forward, backward = data_parallel(
                draw, layers=layers, layer_ms=layer_ms, group=dp, buckets=2 if dp else 0,
                bucket_bytes=sized(0.1, 2, max(2, hosts_count)),
            )  # fmt: skip
            tp = f"in{rank // a_host}"
            programmes.append(
                [
                    *blocking_layers(forward, tp, name, size),
                    *blocking_layers(backward, tp, name, size),
                    optimizer,
                ]
            )
    elif kind in ("fsdp", "hsdp"):
        groups = {"shard": everybody} if kind == "fsdp" or hosts_count == 1 else {**inside, **across}
        for rank in everybody:
            shard = "shard" if "shard" in groups else f"in{rank // a_host}"
            size = sized(share, 3 * layers, len(groups[shard]), 1)
            programme: list[Operation] = [Ask(shard, "all_gather", size, FORWARD, key="gather 0")]
            for layer in range(layers):
                programme += [Await(f"gather {layer}")]
                if layer + 1 < layers:
                    programme.append(Ask(shard, "all_gather", size, FORWARD, key=f"gather {layer + 1}"))
                programme.append(Compute(layer_ms, FORWARD))
            programme.append(Ask(shard, "all_gather", size, BACKWARD, key="again 0"))
            for layer in range(layers):
                programme += [Await(f"again {layer}")]
                if layer + 1 < layers:
                    programme.append(Ask(shard, "all_gather", size, BACKWARD, key=f"again {layer + 1}"))
                programme.append(Compute(2 * layer_ms, BACKWARD))
                programme.append(Ask(shard, "reduce_scatter", size, BACKWARD, key=f"scatter {layer}"))
                if shard != "shard":
                    programme += [Await(f"scatter {layer}")]
                    replicas = f"across{rank % a_host}"
                    programme.append(
                        Ask(
                            replicas,
                            "all_reduce",
                            sized(0.05, layers, hosts_count),
                            BACKWARD,
                            key=f"all {layer}",
                        )
                    )
            last = "scatter" if shard == "shard" else "all"
            programme += [Await(f"{last} {layer}") for layer in range(layers)]
            programmes.append([*programme, optimizer])
    elif kind == "pp":
        stages, micro_batches = draw.choice([2, 4]), draw.choice([4, 8])
        stages = min(stages, world)
        columns = world // stages
        size = sized(share / 4, 2 * micro_batches, 2, 1)
        schedules = [
            one_forward_one_backward(rank, stages, columns, micro_batches, layer_ms, size)
            for rank in everybody
        ]
        for rank in everybody:
            if rank + columns < world:
                groups |= {f"f{rank}": (rank, rank + columns), f"b{rank}": (rank, rank + columns)}
        for column in range(stages):
            if columns > 1:
                groups[f"dp{column}"] = tuple(range(column * columns, (column + 1) * columns))
        programmes = [
            [
                *programme,
                *(
                    [Ask(f"dp{rank // columns}", "all_reduce", 2**20, BACKWARD, waits=True)]
                    if columns > 1
                    else []
                ),
                optimizer,
            ]
            for rank, programme in enumerate(schedules)
        ]
    else:
        raise ValueError(kind)
    offsets = {f"h{h}": draw.choice([0.0, draw.uniform(-5e3, 5e3)]) if h else 0.0 for h in range(hosts_count)}
    slow = {}
    if draw.random() < 0.5:
        slow = {draw.randrange(world): draw.uniform(1.15, 1.5)}
    # Some releases call several groups alike, others one group differently on each rank.
    order = {rank: [name for name, ranks in groups.items() if rank in ranks] for rank in everybody}
    names: Callable[[int, str], str] = draw.choice(
        [
            lambda _rank, group: group,
            lambda rank, group: str(1 + order[rank].index(group)),
            lambda rank, group: f"{group} of {rank}",
        ]
    )
    return Job(
        kind, programmes, groups, dict.fromkeys(groups, gbps), hosts, names=names, steps=draw.randint(5, 8), slow=slow,
        offsets_us=offsets, drifts_ppm={host: draw.uniform(-20, 20) for host in hosts if host != "h0"},
        descriptions=descriptions, seed=seed,
    )  # fmt: skip
