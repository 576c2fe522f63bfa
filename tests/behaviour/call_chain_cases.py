"""Run in two ranks: the calls between a gradient's hook and its collective, and the files of a micro-batch."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import headway
from headway.collectives import executor
from headway.scheduling.buckets import GatherMode
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.strategies.decoupled.wrapper import wrap
from headway.strategies.pipeline.plugin import pipelined
from headway.strategies.pipeline.policy import PipelineStrategy

ROOT = str(Path(headway.__file__).parent)
LAYERS, WIDTH = 12, 8
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH

Chain = list[tuple[str, str]]  # file, function


class Calls:
    """What is called on the thread that trains, and on those of channels that were started meanwhile."""

    def __init__(self) -> None:
        self.watching = False
        self.count = 0
        self.to_queue: list[Chain] = []  # from outside of Headway to a channel's queue
        self.to_collective: list[Chain] = []  # from a thread's beginning to the compiled loop

    def on_main(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.count += 1
        elif event == "c_call" and getattr(argument, "__name__", "") == "put":
            self.to_queue.append(chain_to(frame))

    def on_thread(self, frame: FrameType, event: str, _argument: Any) -> None:
        """A profile function."""
        runs = frame.f_code.co_filename.endswith("/collectives/live.py") and frame.f_code.co_name == "run"
        if self.watching and event == "call" and runs:
            self.to_collective.append(chain_to(frame))


def chain_to(frame: FrameType | None) -> Chain:
    """Headway's calls that are open, the first one first: up to where another's code called it."""
    found: Chain = []
    while frame is not None and frame.f_code.co_filename.startswith(ROOT):
        found.append((frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname))
        frame = frame.f_back
    return found[::-1]


def watch(_rank: int, _world_size: int) -> dict[str, Any]:
    """What is seen in a backward, by what is gathered."""
    found: dict[str, Any] = {}
    modes: tuple[GatherMode, ...] = ("gradients", "parameters")
    for mode in modes:
        calls = Calls()
        threading.setprofile(calls.on_thread)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        wrapped = wrap(model, DecoupledStrategy(bucket_cap_bytes=4 * LAYER_BYTES, gather=mode))
        threading.setprofile(None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = wrapped(torch.ones(2, WIDTH)).sum()
            if step == 2:  # programs have been prepared
                calls.watching = True
                sys.setprofile(calls.on_main)
            loss.backward()
            sys.setprofile(None)
            wrapped.flush()
            optimizer.step()
        calls.watching = False
        wrapped.flush()
        found[mode] = {
            "to_queue": calls.to_queue, "to_collective": calls.to_collective,
            "compiled": isinstance(executor.compiled(), torch.jit.ScriptFunction),
            "calls_a_parameter": calls.count / (2 * LAYERS),
        }  # fmt: skip
    return found


class Doubled(nn.Module):
    """Two layers in a forward of its own, so that it is traced to be cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        hidden: torch.Tensor = self.first(batch).relu()
        return torch.as_tensor(self.second(hidden))


def watch_micro_batches(_rank: int, _world_size: int) -> list[str]:
    """The files of Headway that are called in a step of a pipeline, once its stages are prepared."""
    model, batch = Doubled(), torch.ones(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = PipelineStrategy(micro_batches=2, split_points=("second",))
    stage = pipelined(model, optimizer, strategy, nn.functional.mse_loss, batch)
    files: set[str] = set()

    def on_call(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    for step in range(2):
        if step:
            sys.setprofile(on_call)
        stage.train_step(batch, batch)
        sys.setprofile(None)
    return sorted(files)
