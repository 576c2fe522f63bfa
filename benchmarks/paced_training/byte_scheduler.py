"""A priority scheduler after ByteScheduler (SOSP 2019): partitions, credit, front layers first.

Gradients are cut into partitions that are all-reduced one by one; of those that are ready, the one of the frontmost
layer goes next, as long as fewer bytes than the credit are in flight. Rank 0 decides and tells the others, as
collectives must be issued in one order. A layer's next forward waits for its own partitions only.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

from paced_training.jobs import PacedJob
from paced_training.layered import Layered

PARTITION_BYTES, CREDIT_BYTES = 4e6, 1.6e7  # those of DeAR's evaluation; scaled as the model is
_MOST_AT_ONCE = 31
_STOP = -1
_FOREVER = timedelta(hours=12)  # followers wait in a receive while other methods are measured


@dataclass
class _Partition:
    layer: int
    size_bytes: int
    data: torch.Tensor | None = None  # set while ready or in flight


class ByteScheduler(Layered):
    name = "bytescheduler"
    bound = "across steps"

    def __init__(self, job: PacedJob) -> None:
        super().__init__(job)
        self._world_size, self._root = dist.get_world_size(), dist.get_rank() == 0
        self._collectives = dist.new_group(backend="gloo")
        self._decisions = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._credit = CREDIT_BYTES * job.scale
        self._step = max(1, int(PARTITION_BYTES * job.scale) // 4)
        self._partitions: list[_Partition] = []
        self._of: dict[tuple[int, int], list[int]] = {}
        for index, layer in enumerate(self.layers):
            for position, parameter in enumerate(layer.parameters):
                self._of[index, position] = [
                    self._number(index, min(self._step, parameter.numel() - start))
                    for start in range(0, parameter.numel(), self._step)
                ]
        self._left = [0] * len(self.layers)
        self._changed = threading.Condition()
        self._heap: list[tuple[int, int]] = []
        self._in_flight = 0.0
        self._stopping = False
        self._launched: SimpleQueue[tuple[_Partition, dist.Work] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._schedule, self._complete)
        ]
        for thread in self._threads:
            thread.start()
        self.note = f"{len(self._partitions)} partitions"

    def ready(self, index: int, position: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        flat = gradient.view(-1)
        numbers = self._of[index, position]
        with self._changed:
            for order, number in enumerate(numbers):
                self._partitions[number].data = flat[order * self._step : (order + 1) * self._step]
                heapq.heappush(self._heap, (index, number))
            self._left[index] += len(numbers)
            self._changed.notify_all()

    def update(self) -> None:
        super().update()
        for layer in self.layers:
            layer.due = True

    def arrive(self, index: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left[index] == 0)
        layer = self.layers[index]
        gradients = [p.grad for p in layer.parameters if p.grad is not None]
        for gradient in gradients:
            gradient.div_(self._world_size)
        layer.gradients = gradients

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        dist.destroy_process_group(self._collectives)
        dist.destroy_process_group(self._decisions)

    def _number(self, layer: int, numel: int) -> int:
        self._partitions.append(_Partition(layer, 4 * numel))
        return len(self._partitions) - 1

    def _schedule(self) -> None:
        while (chosen := self._choose() if self._root else self._hear()) is not None:
            for number in chosen:
                partition = self._partitions[number]
                with self._changed:
                    self._changed.wait_for(lambda partition=partition: partition.data is not None)  # type: ignore[misc]
                assert partition.data is not None
                work = dist.all_reduce(partition.data, group=self._collectives, async_op=True)
                assert work is not None
                self._launched.put((partition, work))
        self._launched.put(None)

    def _complete(self) -> None:
        while (item := self._launched.get()) is not None:
            partition, work = item
            work.wait()
            with self._changed:
                partition.data = None
                self._in_flight -= partition.size_bytes
                self._left[partition.layer] -= 1
                self._changed.notify_all()

    def _choose(self) -> list[int] | None:
        """The partitions to launch next, which are announced; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or (self._heap and self._in_flight < self._credit))
            chosen: list[int] = []
            while self._heap and self._in_flight < self._credit and len(chosen) < _MOST_AT_ONCE:
                _, number = heapq.heappop(self._heap)
                self._in_flight += self._partitions[number].size_bytes
                chosen.append(number)
        count = len(chosen) if chosen else _STOP
        message = torch.tensor([count, *chosen] + [0] * (_MOST_AT_ONCE - len(chosen)))
        sends = [dist.isend(message, group=self._decisions, group_dst=r) for r in range(1, self._world_size)]
        for send in sends:
            assert send is not None
            send.wait()
        return chosen or None

    def _hear(self) -> list[int] | None:
        message = torch.empty(1 + _MOST_AT_ONCE, dtype=torch.int64)
        dist.recv(message, group=self._decisions, group_src=0)
        count = int(message[0])
        if count == _STOP:
            return None
        chosen = message[1 : count + 1].tolist()
        with self._changed:
            self._in_flight += sum(self._partitions[number].size_bytes for number in chosen)
        return chosen
