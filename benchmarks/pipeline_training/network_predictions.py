"""What replay says of blocks of steps: on the lab's links, with its tenants' traffic at the time of each block."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from headway.cluster import Cluster, Host, Traffic
from headway.graph.computation import Computation, Item, Part, Timeline
from headway.job import Job
from headway.model import ModelSpec
from headway.simulator.simulate import Simulation, simulate
from headway.strategies.pipeline.plugin import step_bound_ms
from headway.strategies.pipeline.policy import PipelineStrategy
from pipeline_training.network_cases import NetworkCase

LATENCY_US = 100.0
CONNECTIONS = 4  # of each tenant of the lab
WINDOW_BYTES = 128 * 2**10  # what a connection of the lab keeps queued
Steps = Sequence[tuple[float, float]]  # when each began (s after the lab), and how long it took (ms)


def mixed_ms(times_ms: Sequence[float]) -> float:
    """The mean step where each of ``times_ms`` holds for as long as the others."""
    return len(times_ms) / sum(1 / each for each in times_ms)


class Predictions:
    """Replays of a case, with passes and links as ``found`` has measured them alone."""

    def __init__(self, case: NetworkCase, found: dict[str, Any]) -> None:
        self._case = case
        self._passes_ms: list[list[float]] = found["passes_ms"]
        gbps = case.model.boundary_bytes[0] * 8 / (found["stream_ms"] * 1e6)
        burst_bytes = max(0.0, (found["stream_ms"] - found["message_ms"]) * 1e6 * gbps / 8)
        slow = {n: gbps * mbit / case.rate_mbit for n, mbit in case.slow_up_mbit.items()}
        hosts = tuple(
            Host(name=f"host{n}", workers=1, up_gbps=slow.get(n, gbps), down_gbps=gbps)
            for n in range(case.stages)
        )
        self._cluster = Cluster(
            hosts=hosts, latency_us=LATENCY_US, burst_bytes=round(burst_bytes), window_bytes=WINDOW_BYTES
        )

    @property
    def bound_ms(self) -> float:
        """What no order can beat."""
        return step_bound_ms(self._job(1))

    def of(self, strategy: PipelineStrategy, blocks: Sequence[Steps]) -> float:
        """The median over ``blocks`` of the mean step in each; of phases, each of these by itself."""
        if not self._case.tenants:
            return self._played(strategy, 1).step_ms
        if self._case.is_phases:
            busy = [each for link in self._case.tenants for each in self._traffic(link, 0.0, None)]
            return mixed_ms([self._played(strategy, 1, with_traffic).step_ms for with_traffic in ((), busy)])
        return median(self._in_block_ms(strategy, block) for block in blocks)

    def _in_block_ms(self, strategy: PipelineStrategy, block: Steps) -> float:
        """The mean step of one block; the step before it, in which replay warms up, is without tenants."""
        alone = self._played(strategy, len(block))
        begin = alone.graph.boundaries[alone.first_step - 1]
        begin_ms = max(alone.played.end_ns[list(begin)]) / 1e6 - block[0][0] * 1e3
        bursts = [
            each
            for link in self._case.tenants
            for begin_s, end_s in self._case.busy_s(link)
            if end_s > block[0][0] and begin_s < block[-1][0] + 10 * len(block)
            for each in self._traffic(
                link, max(begin_s, block[0][0]) * 1e3 + begin_ms, end_s * 1e3 + begin_ms
            )
        ]
        return self._played(strategy, len(block), bursts).step_ms

    def _played(self, strategy: PipelineStrategy, steps: int, traffic: Sequence[Traffic] = ()) -> Simulation:
        cluster = self._cluster.model_copy(update={"traffic": tuple(traffic)})
        return simulate(self._job(steps).moved_to(cluster), strategy)

    def _traffic(self, link: int, begin_ms: float, end_ms: float | None) -> list[Traffic]:
        one, other = (host.name for host in self._cluster.hosts[link : link + 2])
        return [
            Traffic(source=source, target=target, gbps=self._case.tenant_mbit / 1e3, start_ms=begin_ms,
                    end_ms=end_ms, connections=CONNECTIONS)
            for source, target in ((one, other), (other, one))
        ]  # fmt: skip

    def _job(self, steps: int) -> Job:
        case, parts = self._case, (Part.FORWARD, Part.BACKWARD)
        timelines = {
            stage: tuple(
                Timeline(
                    stage, step,
                    tuple(
                        Item(part, duration_ns=round(took_ms * 1e6), stage=stage, micro_batch=number)
                        for part, took_ms in zip(parts, self._passes_ms[stage], strict=True)
                        for number in range(case.micro_batches)
                    ),
                )
                for step in range(steps)
            )
            for stage in range(case.stages)
        }  # fmt: skip
        return Job(
            stages=(ModelSpec(parameters=()),) * case.stages,
            world_size=case.stages,
            cluster=self._cluster,
            computation=Computation(timelines),
            boundary_bytes=case.model.boundary_bytes,
        )
