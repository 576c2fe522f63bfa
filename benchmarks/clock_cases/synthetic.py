"""Synthetic jobs whose true times are known to the nanosecond: data-parallel ones, and pipelines."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headway.arrays import Floats
from headway.trace.events import Events, Kind, Stream

_BEGIN_NS = 5_000_000_000  # times are counted from when machines started


@dataclass(frozen=True)
class Job:
    """What a job does. ``jitter_us`` is the median of what a rank's end is late by (lognormal, and outliers)."""

    hosts: int
    ranks_a_host: int = 1
    seconds: float = 10.0
    step_ms: float = 150.0
    jitter_us: float = 20.0
    outliers: float = 0.01  # share of ends that are late by up to a hundred times as much
    uneven: float = 0.05  # spread of computation, as a share of it
    straggler_ms: float = 0.0  # by how much the last host is always late
    early_us: float = 0.0  # by how much the first host always is through before the others
    buckets_ms: tuple[float, ...] = (2.0, 6.0, 6.0)  # what their all-reduces take
    loss_us: float = 150.0  # what the all-reduce of the loss takes; 0 for none
    mistaken: float = 0.0  # share of a rank's collectives that carry a wrong number
    pipeline: bool = False  # hosts only exchange messages with their neighbours
    micro_batches: int = 4
    seed: int = 0

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_a_host

    @property
    def clock_of_rank(self) -> dict[int, str]:
        return {rank: f"host{rank // self.ranks_a_host}" for rank in range(self.ranks)}

    def events(self) -> dict[int, Events]:
        """Every rank's events, in true time."""
        return _Run(self).events()


@dataclass
class _Log:
    """One rank's communication."""

    kind: list[str] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    start_us: list[float] = field(default_factory=list)
    end_us: list[float] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    peer: list[int] = field(default_factory=list)

    def put(
        self, kind: str, name: str, step: int, start_us: float, end_us: float, sequence: int, peer: int = -1
    ) -> None:
        values = (kind, name, step, start_us, end_us, sequence, peer)
        for column, value in zip(vars(self).values(), values, strict=True):
            column.append(value)

    def events(self) -> Events:
        start_ns = _BEGIN_NS + np.rint(np.array(self.start_us) * 1e3).astype(np.int64)
        end_ns = _BEGIN_NS + np.rint(np.array(self.end_us) * 1e3).astype(np.int64)
        return Events.from_columns(
            kind=np.array(self.kind, dtype=object),
            name=np.array(self.name, dtype=object),
            stream=Stream.COMMUNICATION,
            step=np.array(self.step),
            start_ns=start_ns,
            duration_ns=end_ns - start_ns,
            sequence=np.array(self.sequence),
            peer=np.array(self.peer),
            group="0",
        )


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = np.random.default_rng(job.seed)
        self.logs = [_Log() for _ in range(job.ranks)]
        self.now_us = self.random.uniform(0, 1000, job.ranks)
        self.sequence = 0

    def events(self) -> dict[int, Events]:
        for step in range(max(3, round(self.job.seconds * 1e3 / self.job.step_ms))):
            if self.job.pipeline:
                self._pipeline_step(step)
            else:
                self._data_parallel_step(step)
        return {rank: log.events() for rank, log in enumerate(self.logs)}

    def _computed_us(self, usual_ms: float) -> Floats:
        took = usual_ms * 1e3 * (1 + self.job.uneven * self.random.uniform(0, 1, self.job.ranks))
        took[-self.job.ranks_a_host :] += self.job.straggler_ms * 1e3
        return took

    def _late_us(self, count: int) -> Floats:
        job = self.job
        late: Floats = job.jitter_us * self.random.lognormal(0, 1, count)
        return np.where(
            self.random.uniform(0, 1, count) < job.outliers, late * self.random.uniform(10, 100, count), late
        )

    def _collective(self, name: str, step: int, arrival_us: Floats, free_us: float, took_us: float) -> Floats:
        job = self.job
        came_us = max(float(arrival_us.max()), free_us)
        end_us = came_us + took_us * self.random.uniform(1, 1.2) + self._late_us(job.ranks)
        end_us[: job.ranks_a_host] = np.maximum(end_us[: job.ranks_a_host] - job.early_us, came_us)
        for rank, log in enumerate(self.logs):
            wrong = self.random.uniform() < job.mistaken
            log.put(
                Kind.COLLECTIVE, name, step, float(arrival_us[rank]), float(end_us[rank]),
                self.sequence + int(wrong) * int(self.random.integers(1, 5)),
            )  # fmt: skip
        self.sequence += 1
        return end_us

    def _data_parallel_step(self, step: int) -> None:
        job = self.job
        compute_ms = max(1.0, job.step_ms - sum(job.buckets_ms))
        self.now_us += self._computed_us(compute_ms / 3)
        if job.loss_us:
            self.now_us = self._collective("all_reduce", step, self.now_us, 0.0, job.loss_us)
        began_us, took_us = self.now_us, self._computed_us(compute_ms * 2 / 3)
        free_us, ends_us = 0.0, self.now_us
        for number, bucket_ms in enumerate(job.buckets_ms):
            arrival_us = np.maximum(began_us + took_us * (number + 1) / len(job.buckets_ms), ends_us)
            ends_us = self._collective("all_reduce", step, arrival_us, free_us, bucket_ms * 1e3)
            free_us = float(ends_us.min())
        self.now_us = np.maximum(began_us + took_us, ends_us)

    def _message(self, step: int, source: int, target: int, asked_us: float) -> None:
        """``target`` has waited since ``asked_us``; the sender goes on once its message is on its way."""
        late_us = self._late_us(2)
        sent_us, took_us = self.now_us[source], self.job.loss_us + self.random.uniform(0, 200)
        through_us = max(sent_us, asked_us) + took_us + float(late_us[0])
        self.logs[source].put(Kind.SEND, "send", step, sent_us, sent_us + 30 + float(late_us[1]), -1, target)
        self.logs[target].put(Kind.RECEIVE, "receive", step, asked_us, through_us, -1, source)
        self.now_us[source] += 30 + late_us[1]
        self.now_us[target] = through_us

    def _pipeline_step(self, step: int) -> None:
        job = self.job
        micro_ms = job.step_ms / job.micro_batches / 4
        for order in (range(job.ranks), range(job.ranks - 1, -1, -1)):
            stages = list(order)
            for _ in range(job.micro_batches):
                for place, stage in enumerate(stages):
                    if place:
                        self._message(step, stages[place - 1], stage, float(self.now_us[stage]))
                    self.now_us[stage] += micro_ms * 1e3 * self.random.uniform(0.8, 1.2)
