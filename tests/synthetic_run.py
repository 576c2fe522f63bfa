"""A synthetic job's run: every moment of every rank, as events.

Ranks compute as told, collectives run one after another once every member has asked for them, and a rank goes
on from its wait when the last one ends. Nothing is random unless ``jitter`` or ``spread`` asks for it.
"""

from __future__ import annotations

import numpy as np
from tests.synthetic_job import MS, Connections, Extra, SyntheticJob

from headway.trace.events import Event, Kind, Stream


def events_of(job: SyntheticJob) -> dict[int, list[Event]]:
    """Every rank's events."""
    return Run(job).events()


class Run:
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
        if job.by_hand:
            self._reduce_by_hand(step, started)
        else:
            self._reduce_meanwhile(step, started)
        for rank in self.rows:
            self.now[rank] += round(self._took(rank, step, "rest", job.rest_ms) * MS)
            self._span(
                rank, step, Kind.OPTIMIZER, "SGD", self._took(rank, step, "optimizer", job.optimizer_ms)
            )
            length = self.now[rank] - began[rank]
            self.rows[rank].append(Event(Kind.STEP, "", Stream.COMPUTE, step, began[rank], length))
        if job.connections is not None and job.connections.counted:
            self._count(step, began, job.connections)

    @property
    def _buckets(self) -> int:
        return len(self.job.bucket_bytes) if self.job.world_size > 1 else 0

    def _reduce_meanwhile(self, step: int, started: dict[int, int]) -> None:
        """Reduce each bucket when its gradients are ready; the backward passes end when the last has arrived."""
        computed = dict(self.now)
        ends = dict(self.now)
        for bucket in range(self._buckets):
            arrivals = self._ready(step, bucket, started, computed)
            ends = self._all_reduce(step, arrivals, self.job.bucket_bytes[bucket], bucket)
        for rank in self.rows:
            self._wait(rank, step, "gradients", ends[rank])
            self._backward_pass(rank, step, started[rank])

    def _reduce_by_hand(self, step: int, started: dict[int, int]) -> None:
        """Reduce bucket by bucket when the backward passes are over, and wait for each."""
        computed = dict(self.now)
        for rank in self.rows:
            self._backward_pass(rank, step, started[rank])
        for bucket in range(self._buckets):
            self._ready(step, bucket, started, computed)
            ends = self._all_reduce(step, dict(self.now), self.job.bucket_bytes[bucket], bucket=-1)
            for rank, end in ends.items():
                self._wait(rank, step, "all_reduce", end)

    def _ready(
        self, step: int, bucket: int, started: dict[int, int], computed: dict[int, int]
    ) -> dict[int, int]:
        """When each rank has a bucket's gradients."""
        share = (bucket + 1) / self._buckets
        moments = {
            rank: round(started[rank] + share * (computed[rank] - started[rank])) for rank in self.rows
        }
        if self.job.one_module_a_bucket:
            for rank, moment in moments.items():
                name = f"{self.job.modules[-1 - bucket]}.weight"
                self.rows[rank].append(Event(Kind.GRADIENT_READY, name, Stream.COMPUTE, step, moment, 0))
        return moments

    def _backward_pass(self, rank: int, step: int, started: int) -> None:
        length = self.now[rank] - started
        self.rows[rank].append(Event(Kind.BACKWARD_PASS, "", Stream.COMPUTE, step, started, length))

    def _count(self, step: int, began: dict[int, int], links: Connections) -> None:
        """What each rank's connection to the next one carried, for how long it was busy, and at which rate."""
        sizes = (*self.job.bucket_bytes, *((4,) if self.job.blocking_loss else ()))
        sent = round(sum(self.job.ring_bytes(size) for size in sizes))
        for rank, rows in self.rows.items() if self.job.world_size > 1 else ():
            peer = (rank + 1) % self.job.world_size
            gbps = self.job.link_gbps(rank, step)
            busy = round(8 * sent / gbps * links.held_up.get((rank, peer), 1.0))
            busy = min(max(busy, 1000), self.now[rank] - began[rank])
            seen_gbps = gbps * (1 + links.spread * self.random.uniform(-1, 1))
            rows += [
                Event(Kind.LINK, "", Stream.COMMUNICATION, step, began[rank], busy, size_bytes=sent, peer=peer),
                Event(
                    Kind.DELIVERY_RATE, "", Stream.COMMUNICATION, step, self.now[rank], 0,
                    size_bytes=round(seen_gbps * 1e9 / 8), peer=peer,
                ),
            ]  # fmt: skip

    def _took(self, rank: int, step: int, part: str, usual_ms: float) -> float:
        slow = self.job.slow_steps is None or step in self.job.slow_steps
        extra = self.job.slow.get((rank, part), 0.0) if slow else 0.0
        extra += sum(
            self._extra(one, step) for one in self.job.extras if (one.rank, one.part) == (rank, part)
        )
        return float(usual_ms * (1 + self.job.jitter * self.random.uniform(0, 1)) + extra)

    def _extra(self, extra: Extra, step: int) -> float:
        if step not in extra.steps:
            return 0.0
        if extra.pause:
            now, length = self.now[extra.rank], round(extra.ms * MS)
            self.rows[extra.rank].append(Event(Kind.PAUSE, extra.pause, Stream.COMPUTE, step, now, length))
        return extra.ms

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
        end = start + round(self.job.transfer_ms(size_bytes, step) * MS)
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
