"""One worker of a schedule of faults: a real job whose every state is known beforehand, and is written down.

All elements of the model are equal, so a mean that was taken in part shows as a spread. The gradient of worker w in
iteration i pulls towards ``target(w, i)``, so that each step, each mean and each join can be checked by arithmetic.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
import traceback
import zlib
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from decentralised_training.fault_schedules import TIME_LIMIT_S
from headway.strategies.partial_all_reduce.coordinator.client import CoordinatorClient
from headway.strategies.partial_all_reduce.rounds import Round
from headway.strategies.partial_all_reduce.runtime import PartialAllReduce

RATE = 0.05
FLOATS = (
    65_536  # 256 KiB: some 20 ms on a link of 100 Mbit/s, so that faults strike in the middle of averages
)
COMPUTE_S = 0.06
JOIN_S, FINISH_S = 20.0, 20.0


def target(worker: int, iteration: int) -> float:
    """What a worker's gradient pulls towards; 3 in the mean."""
    return 3.0 + (0.5 if worker % 2 else -0.5) + (iteration % 5 - 2) * 0.1


def stepped(x: float, worker: int, iteration: int) -> float:
    """What step ``iteration`` (from 1) of a worker makes of ``x``."""
    return x - RATE * (x - target(worker, iteration))


class Uniform(nn.Module):
    """A model of equal elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FLOATS))

    def forward(self, wanted: float) -> torch.Tensor:
        return 0.5 * (self.weight - wanted).square().sum()


class Log:
    """What a worker writes down: a line of JSON for whatever happens, with its time (s, of the machine)."""

    def __init__(self, path: Path, weight: torch.Tensor) -> None:
        self._file: TextIO = path.open("w", buffering=1)
        self._weight = weight.detach()

    def say(self, kind: str, **said: Any) -> None:
        low, high = (float(each) for each in torch.aminmax(self._weight))
        state = {"x": float(self._weight[0]), "low": low, "high": high}
        self._file.write(json.dumps({"kind": kind, "at": time.monotonic(), **state, **said}) + "\n")

    def checksum(self) -> int:
        return zlib.crc32(self._weight.numpy().tobytes())


def work(config: dict[str, Any]) -> None:
    """Train until the file ``stop`` is there, then finish. Never returns; writes to ``log``."""
    status = 1
    try:
        prepare(config)
        _train(config)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def prepare(config: dict[str, Any]) -> None:
    """Be a process of one's own: session, output, the name of its host; SIGUSR1 has it say where its threads are."""
    os.setsid()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python that was not forked in the lab
    os.environ["HEADWAY_HOST"] = config["host_name"]
    output = os.open(config["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)


def _train(config: dict[str, Any]) -> None:
    worker, stop = config["worker"], Path(config["stop"])
    module = Uniform()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    log = Log(Path(config["log"]), module.weight)

    def observe(each: Round) -> None:
        log.say(
            "round", iteration=each.iteration, ending=each.ending.value, number=each.number, members=each.members,
            iterations=each.iterations, reason=each.reason, checksum=log.checksum(),
        )  # fmt: skip

    secret = config["secret"].encode()
    wrapped = PartialAllReduce(
        module, CoordinatorClient(config["coordinator"], secret), optimizer, worker=worker, host=config["host"],
        secret=secret, staleness=config["staleness"], time_limit_s=TIME_LIMIT_S, join_timeout_s=JOIN_S,
        observer=observe,
    )  # fmt: skip
    optimizer.register_step_post_hook(  # before averaging
        lambda *_: log.say("step", iteration=wrapped.iteration + 1)
    )
    log.say("joined", iteration=wrapped.iteration)
    while not stop.exists():
        time.sleep(COMPUTE_S)
        optimizer.zero_grad()
        wrapped(target(worker, wrapped.iteration + 1)).backward()
        optimizer.step()
    log.say("finishing")
    finished = wrapped.finish(timeout_s=FINISH_S)
    log.say("finished", workers=finished.workers, checksum=log.checksum(), iteration=wrapped.iteration)
