"""Synthetic traces with known truth: a data-parallel job whose every moment is planned.

Ranks compute as told, collectives run one after another once every member has asked for them, and a rank goes
on from its wait when the last one ends. Nothing is random unless ``jitter`` asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.model import ModelSpec, ParameterSpec
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.folder import assemble, write_rank
from headway.trace.format import ClockFit, Manifest, RankInfo, Trace

MS = 1_000_000


@dataclass(frozen=True)
class SyntheticJob:
    """What the job does. Times are milliseconds a step, sizes bytes."""

    world_size: int = 4
    steps: int = 6
    ranks_a_host: int = 1
    input_ms: float = 1.0
    forward_ms: float = 10.0
    backward_ms: float = 20.0
    optimizer_ms: float = 2.0
    rest_ms: float = 0.5
    modules: tuple[str, ...] = ("stem", "layer1", "layer2", "head")
    bucket_bytes: tuple[int, ...] = (1_000_000, 1_000_000, 1_000_000, 1_000_000)
    gbps: float = 8.0
    latency_ms: float = 0.05
    slow: dict[tuple[int, str], float] = field(default_factory=dict)  # (rank, part) -> extra ms a step
    slow_steps: tuple[int, ...] | None = None  # where None, every step
    blocking_loss: bool = False  # an all-reduce of the loss between forward and backward
    jitter: float = 0.0  # spread of computation, as a share of it
    seed: int = 0

    @property
    def one_module_a_bucket(self) -> bool:
        """Whether each bucket carries the one parameter of one module, so that a replay can rebuild the job."""
        return len(self.modules) == len(self.bucket_bytes)

    def transfer_ms(self, size_bytes: int) -> float:
        """How long a ring all-reduce of a tensor takes."""
        volume = 2 * (self.world_size - 1) / self.world_size * size_bytes
        return self.latency_ms + 8e-6 * volume / self.gbps


def events_of(job: SyntheticJob) -> dict[int, list[Event]]:
    """Every rank's events."""
    return _Run(job).events()


def synthetic_trace(job: SyntheticJob | None = None) -> Trace:
    """The job's trace, in memory."""
    job = job or SyntheticJob()
    rows = events_of(job)
    return trace_of(rows, model=_model(job), infos=_infos(job))


def trace_of(
    rows: dict[int, list[Event]], *, model: ModelSpec | None = None, infos: tuple[RankInfo, ...] | None = None
) -> Trace:
    """A trace in memory from any events."""
    steps: set[int] = set.intersection(
        *({event.step for event in events if event.kind == Kind.STEP} for events in rows.values())
    )
    ranks = infos or tuple(_info(rank, len(rows), f"host{rank}") for rank in rows)
    manifest = Manifest(world_size=len(rows), steps=tuple(sorted(steps)), ranks=ranks)
    columns = {rank: Events.from_rows(events) for rank, events in rows.items()}
    return Trace(Path("synthetic"), manifest, model or ModelSpec(parameters=()), columns)


def write_trace(job: SyntheticJob, folder: Path) -> Path:
    """Write the job's trace as a recording would; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = events_of(job)
    for info in _infos(job):
        write_rank(folder, info, _model(job), rows[info.rank])
    assemble(folder)
    return folder


def _model(job: SyntheticJob) -> ModelSpec:
    sizes = job.bucket_bytes[::-1] if job.one_module_a_bucket else [4000] * len(job.modules)
    parameters = tuple(
        ParameterSpec(name=f"{module}.weight", shape=(size // 4,), dtype="float32", module=module)
        for module, size in zip(job.modules, sizes, strict=True)
    )
    ready = tuple(parameter.name for parameter in reversed(parameters))
    return ModelSpec(parameters=parameters, forward_order=job.modules, ready_order=ready)


def _infos(job: SyntheticJob) -> tuple[RankInfo, ...]:
    return tuple(
        _info(rank, job.world_size, f"host{rank // job.ranks_a_host}") for rank in range(job.world_size)
    )


def _info(rank: int, world_size: int, host: str) -> RankInfo:
    clock = ClockFit(offset_ns=1500.0 * rank, drift_ppm=0.5 * rank, uncertainty_ns=2000.0 * (rank > 0))
    return RankInfo(
        rank=rank,
        host=host,
        pid=100 + rank,
        world_size=world_size,
        backend="gloo",
        version="2.13.0",
        clock=clock,
    )


class _Run:
    """One run of a job, step by step over all ranks."""

    def __init__(self, job: SyntheticJob) -> None:
        self.job = job
        self.random = np.random.default_rng(job.seed)
        self.rows: dict[int, list[Event]] = {rank: [] for rank in range(job.world_size)}
        self.now = dict.fromkeys(self.rows, 50 * MS)
        self.sequence = 0
        self.link_free = 0

    def events(self) -> dict[int, list[Event]]:
        for step in range(self.job.steps):
            self._step(step)
        return self.rows

    def _step(self, step: int) -> None:
        job = self.job
        began = dict(self.now)
        for rank in self.rows:
            self._span(rank, step, Kind.INPUT, "", self._took(rank, step, "input", job.input_ms))
            self._pass(
                rank,
                step,
                inner=Kind.FORWARD,
                outer=Kind.FORWARD_PASS,
                part="forward",
                usual_ms=job.forward_ms,
                modules=job.modules,
            )
        if job.blocking_loss:
            ends = self._all_reduce(step, dict(self.now), 4, bucket=-1)
            for rank, end in ends.items():
                self._wait(rank, step, "all_reduce", end)
        started = dict(self.now)
        for rank in self.rows:
            self._pass(
                rank,
                step,
                inner=Kind.BACKWARD,
                part="backward",
                usual_ms=job.backward_ms,
                modules=job.modules[::-1],
            )
        computed = dict(self.now)
        ends = dict(self.now)
        buckets = len(job.bucket_bytes) if job.world_size > 1 else 0
        for bucket in range(buckets):
            share = (bucket + 1) / buckets
            arrivals = {
                rank: round(started[rank] + share * (computed[rank] - started[rank])) for rank in self.rows
            }
            if job.one_module_a_bucket:
                for rank, arrival in arrivals.items():
                    name = f"{job.modules[-1 - bucket]}.weight"
                    self.rows[rank].append(Event(Kind.GRADIENT_READY, name, Stream.COMPUTE, step, arrival, 0))
            ends = self._all_reduce(step, arrivals, job.bucket_bytes[bucket], bucket)
        for rank in self.rows:
            self._wait(rank, step, "gradients", ends[rank])
            length = self.now[rank] - started[rank]
            self.rows[rank].append(Event(Kind.BACKWARD_PASS, "", Stream.COMPUTE, step, started[rank], length))
            self.now[rank] += round(self._took(rank, step, "rest", job.rest_ms) * MS)
            self._span(
                rank, step, Kind.OPTIMIZER, "SGD", self._took(rank, step, "optimizer", job.optimizer_ms)
            )
            length = self.now[rank] - began[rank]
            self.rows[rank].append(Event(Kind.STEP, "", Stream.COMPUTE, step, began[rank], length))

    def _took(self, rank: int, step: int, part: str, usual_ms: float) -> float:
        slow = self.job.slow_steps is None or step in self.job.slow_steps
        extra = self.job.slow.get((rank, part), 0.0) if slow else 0.0
        return float(usual_ms * (1 + self.job.jitter * self.random.uniform(0, 1)) + extra)

    def _span(self, rank: int, step: int, kind: str, name: str, took_ms: float) -> None:
        length = round(took_ms * MS)
        self.rows[rank].append(Event(kind, name, Stream.COMPUTE, step, self.now[rank], length))
        self.now[rank] += length

    def _pass(
        self,
        rank: int,
        step: int,
        *,
        inner: str,
        outer: str = "",
        part: str,
        usual_ms: float,
        modules: tuple[str, ...],
    ) -> None:
        began = self.now[rank]
        took_ms = self._took(rank, step, part, usual_ms) / len(modules)
        for module in modules:
            self._span(rank, step, inner, module, took_ms)
        if outer:
            self.rows[rank].append(Event(outer, "", Stream.COMPUTE, step, began, self.now[rank] - began))

    def _all_reduce(
        self, step: int, arrivals: dict[int, int], size_bytes: int, bucket: int
    ) -> dict[int, int]:
        start = max(*arrivals.values(), self.link_free)
        end = start + round(self.job.transfer_ms(size_bytes) * MS)
        self.link_free = end
        for rank, arrival in arrivals.items():
            self.rows[rank].append(
                Event(
                    Kind.COLLECTIVE, "all_reduce", Stream.COMMUNICATION, step, start, end - start,
                    enqueue_ns=arrival, group="0", sequence=self.sequence, size_bytes=size_bytes, bucket=bucket,
                    algorithm="ring",
                )
            )  # fmt: skip
        self.sequence += 1
        return dict.fromkeys(arrivals, end)

    def _wait(self, rank: int, step: int, name: str, until: int) -> None:
        if until > self.now[rank]:
            length = until - self.now[rank]
            self.rows[rank].append(Event(Kind.WAIT, name, Stream.COMPUTE, step, self.now[rank], length))
            self.now[rank] = until
