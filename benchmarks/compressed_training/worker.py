"""One rank: every method trains the same network on digits, in turn; one is recorded, and links and cores probed."""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import order_of
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import headway
from headway import files
from headway.compression.registry import proposed
from headway.measuring.probe import probe_cluster
from headway.strategies.ddp.policy import DistributedDataParallelStrategy
from headway.strategies.registry import plugin_of

BATCH, WIDTH, DEPTH = 64, 640, 3
CAP_MB = 2.0
TRACE, PROBED, FOUND = "trace", "probed.yaml", "found.json"
RECORDED = range(5, 25)
SWITCH_INTERVAL_S = 1e-4
PLAIN = "ddp"
METHODS = {PLAIN: DistributedDataParallelStrategy(bucket_cap_mb=CAP_MB)} | {
    codec.describe(): DistributedDataParallelStrategy(bucket_cap_mb=CAP_MB, wire=(codec,))
    for codec in proposed()
}


@dataclass(frozen=True)
class Effort:
    """So many rounds, in each of which every method takes ``warm`` steps and ``steps`` that are timed."""

    rounds: int
    warm: int
    steps: int

    @property
    def all_steps(self) -> int:
        """The steps that a method has taken in the end."""
        return self.rounds * (self.warm + self.steps)


QUICK, FULL = Effort(rounds=3, warm=2, steps=8), Effort(rounds=9, warm=5, steps=40)


class Training:
    """A method: its own copy of the network, which begins as all others do."""

    def __init__(self, strategy: DistributedDataParallelStrategy) -> None:
        torch.manual_seed(0)
        widths = [64, *[WIDTH] * DEPTH]
        layers = [each for a, b in itertools.pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]
        self._model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._wrapped = plugin_of(strategy).wrap(self._model, strategy)
        self._chance = torch.Generator().manual_seed(1 + dist.get_rank())
        digits = load_digits()
        self._x = torch.tensor(digits.data / 16, dtype=torch.float32)
        self._y = torch.tensor(digits.target)

    def steps(self, count: int) -> float:
        """Train; the mean seconds of a step."""
        begun = time.perf_counter()
        for _ in range(count):
            chosen = torch.randint(len(self._x), (BATCH,), generator=self._chance)
            loss = cross_entropy(self._wrapped(self._x[chosen]), self._y[chosen])
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
        return (time.perf_counter() - begun) / count

    def loss(self) -> float:
        """The loss on all digits."""
        with torch.no_grad():
            return float(cross_entropy(self._model(self._x), self._y))


def work(folder: Path, effort: Effort) -> None:
    """Record, probe, and measure all methods, as one rank of the process group in the environment."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    dist.init_process_group("gloo")
    with headway.record(folder / TRACE, first_step=RECORDED.start, stop_step=RECORDED.stop):
        Training(METHODS[PLAIN]).steps(RECORDED.stop)
    cluster = probe_cluster()
    trainings = {name: Training(strategy) for name, strategy in METHODS.items()}
    times_s: dict[str, list[float]] = {name: [] for name in METHODS}
    names = list(METHODS)
    for number in range(effort.rounds):
        for name in (names[each] for each in order_of(number, len(names))):
            dist.barrier()
            trainings[name].steps(effort.warm)
            slowest = torch.tensor([trainings[name].steps(effort.steps)], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times_s[name].append(float(slowest))
    found: dict[str, Any] = {
        name: {"times_ms": [each * 1e3 for each in times_s[name]], "loss": trainings[name].loss()}
        for name in names
    }
    if dist.get_rank() == 0:
        cluster.save(folder / PROBED)
        files.write_text(folder / FOUND, files.dump_json(found))
    dist.barrier()
    dist.destroy_process_group()
