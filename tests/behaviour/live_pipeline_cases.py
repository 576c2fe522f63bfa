"""What ranks do for the tests of live pipelines: train as planned, and say what came of it."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import headway
from headway.errors import CommunicationError
from headway.scheduling.pipeline.orders import ORDERS, grouped, interleaved
from headway.scheduling.pipeline.schedule import PipelineSchedule
from headway.strategies.pipeline.plugin import PLUGIN
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime
from headway.strategies.pipeline.tuning.follower import Follower, TunerProcess
from headway.strategies.pipeline.tuning.observed import number_and_candidate
from headway.strategies.pipeline.tuning.tuner import Decision, Tuner
from headway.torch_private.pipelining import PipelineSteps

MICRO_BATCHES, ROWS, WIDTH, STEPS = 6, 2, 8, 3


def part(stage: int) -> nn.Module:
    """One stage of the model: the same wherever it is built."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's input and target."""
    torch.manual_seed(1000 + step)
    return torch.randn(MICRO_BATCHES * ROWS, WIDTH), torch.randn(MICRO_BATCHES * ROWS, WIDTH)


def orders(stages: int) -> dict[str, PipelineSchedule]:
    """Every order that one stage a rank is trained in."""
    found = {name: order(stages, MICRO_BATCHES) for name, order in ORDERS.items()}
    found |= {f"k={size}": grouped(stages, MICRO_BATCHES, size) for size in (2, 3, 4)}
    found["k=2 and more memory"] = replace(found["k=2"], receive_buffers=5)
    return found


def in_every_order(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """For each order, and for all in turn: the losses on the last rank, and this rank's parameters, of every step."""
    found = {}
    every = orders(world_size)
    for name, schedule in every.items():
        found[name] = trained(rank, world_size, [schedule] * STEPS)
    found["all in turn"] = trained(rank, world_size, [*every.values()])
    return found


def trained(rank: int, world_size: int, schedules: list[PipelineSchedule]) -> list[list[float]]:
    """One step in each order, of one stage a rank."""
    own = part(rank)
    stage = PipelineStage(own, rank, world_size, torch.device("cpu"))
    steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    runtime = PipelineRuntime(PipelineSteps(steps), schedules[0])
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    found = []
    for number, schedule in enumerate(schedules):
        runtime.follow(schedule)
        optimizer.zero_grad()
        found.append(one_step(steps, rank, world_size, number))
        optimizer.step()
        found[-1] += flat(own)
        if number == 0:
            found[-1] += evaluated(steps, rank, world_size)
    return found


def evaluated(steps: ScheduleGPipe | Schedule1F1B, rank: int, world_size: int) -> list[float]:
    """The output of an evaluation between steps, on the last rank."""
    data, target = batch(99)
    with torch.no_grad():
        if rank == 0:
            output = steps.eval(data)
        elif rank == world_size - 1:
            output = steps.eval(target=target, losses=[])
        else:
            output = steps.eval()
    return [] if output is None else output.flatten().tolist()


def one_step(
    steps: Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B, rank: int, world_size: int, number: int
) -> list[float]:
    """Run one step; the losses, on the last rank."""
    data, target = batch(number)
    losses: list[torch.Tensor] = []
    if rank == 0:
        steps.step(data)
    elif rank == world_size - 1:
        output = steps.step(target=target, losses=losses)
        assert output.shape == target.shape
    else:
        steps.step()
    return [float(each.detach()) for each in losses]


def flat(module: nn.Module) -> list[float]:
    """All parameters."""
    return torch.cat([each.detach().flatten() for each in module.parameters()]).tolist()


def several_stages_a_rank(rank: int, world_size: int) -> list[list[float]]:
    """Interleaved: two stages a rank."""
    count = 2 * world_size
    own = [part(stage) for stage in range(rank, count, world_size)]
    stages: list[Any] = [
        PipelineStage(each, number, count, torch.device("cpu"))
        for each, number in zip(own, range(rank, count, world_size), strict=True)
    ]
    steps = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    PipelineRuntime(PipelineSteps(steps), interleaved(world_size, 2, MICRO_BATCHES))
    optimizer = torch.optim.SGD(nn.ModuleList(own).parameters(), lr=0.1)
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        found.append(one_step(steps, rank, world_size, number))
        optimizer.step()
        found[-1] += flat(nn.ModuleList(own))
    return found


def alone(stages: int, steps: int) -> list[dict[str, list[float]]]:
    """The same training in one process: losses, parameters by stage, and the evaluation after the first step."""
    parts = nn.ModuleList(part(stage) for stage in range(stages))
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(steps):
        data, target = batch(number)
        optimizer.zero_grad()
        losses = []
        for some, wanted in zip(data.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True):
            loss = nn.functional.mse_loss(model(some), wanted)
            (loss / MICRO_BATCHES).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        with torch.no_grad():
            output = model(batch(99)[0])
        found.append(
            {"losses": losses, "output": output.flatten().tolist()}
            | {str(stage): flat(each) for stage, each in enumerate(parts)}
        )
    return found


ANEW = {"1f1b": 2, "zero-bubble": 3, "gpipe": 12}


def split_anew(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """By orders: this rank's parameters in every step of a schedule whose plan has another number of micro-batches."""
    found: dict[str, list[list[float]]] = {}
    for order, count in ANEW.items():
        own = part(rank)
        stage = PipelineStage(own, rank, world_size, torch.device("cpu"))
        steps = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        strategy = PipelineStrategy.model_validate(
            {"order": order, "micro_batches": count, "script_micro_batches": MICRO_BATCHES}
        )
        PLUGIN.schedule_injection.take_over(PipelineSteps(steps), strategy)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        found[order] = []
        for number in range(STEPS):
            optimizer.zero_grad()
            losses = one_step(steps, rank, world_size, number)
            assert len(losses) == (count if rank == world_size - 1 else 0)
            optimizer.step()
            found[order].append(flat(own) + (evaluated(steps, rank, world_size) if number == 0 else []))
    return found


SWITCHES = 100


def switched_often(rank: int, world_size: int) -> dict[str, list[float]]:
    """This rank's parameters after many steps: the size of groups changes before each, and never."""
    sizes = [grouped(world_size, MICRO_BATCHES, size) for size in (1, 2, 3, 6)]
    often = [sizes[number % len(sizes)] for number in range(SWITCHES + 1)]
    return {
        "often": trained(rank, world_size, often)[-1],
        "never": trained(rank, world_size, [sizes[0]] * (SWITCHES + 1))[-1],
    }


class Scripted:
    """A tuner that wants the next candidate after every step."""

    def __init__(self, tuner: Tuner) -> None:
        self.is_alive = True
        self._count = len(tuner.candidates)
        self._decisions: list[Decision] = []

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        number, candidate = number_and_candidate(rows[0])
        self._decisions.append(Decision(number, candidate, (candidate + 1) % self._count, "in turn"))

    def decisions(self) -> list[Decision]:
        found, self._decisions = self._decisions, []
        return found

    def close(self) -> None:
        """Nothing runs."""


FOLLOWED_STEPS = 9


def followed(rank: int, world_size: int) -> dict[str, Any]:
    """Training under a tuner that switches, one that thinks, and one whose process is killed."""
    strategy = PipelineStrategy(order="kfkb", group_sizes=(2, 3), micro_batches=MICRO_BATCHES)
    found: dict[str, Any] = {}
    for name, start in (("scripted", Scripted), ("thinking", _Patient), ("killed", _Killed)):
        own = part(rank)
        stage = PipelineStage(own, rank, world_size, torch.device("cpu"))
        steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        taken_over = PipelineSteps(steps)
        runtime = PipelineRuntime(taken_over, grouped(world_size, MICRO_BATCHES, 1))
        follower = Follower(taken_over, runtime, strategy, start)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        values = []
        for number in range(FOLLOWED_STEPS):
            optimizer.zero_grad()
            values.append(one_step(steps, rank, world_size, number))
            optimizer.step()
            values[-1] += flat(own)
        decided = [(each.step, each.before, each.candidate) for each in follower.decisions]
        found[name] = {"values": values, "decided": decided, "alive": follower.has_tuner}
        del own, stage, steps, taken_over, runtime, follower, optimizer
        gc.collect()
        found[name]["left behind"] = len(psutil.Process().children())
    return found


class _Patient(TunerProcess):
    """One that training waits for: these steps are over before it has begun to think."""

    def __init__(self, tuner: Tuner) -> None:
        super().__init__(tuner)
        self._open = 0

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        super().tell(rows)
        self._open += 1

    def decisions(self) -> list[Decision]:
        found = super().decisions()
        until = time.monotonic() + 60
        while len(found) < self._open and time.monotonic() < until:
            time.sleep(0.01)
            found += super().decisions()
        self._open -= len(found)
        return found


class _Killed(TunerProcess):
    """One whose process is killed when it is told of the third step."""

    def tell(self, rows: Sequence[Sequence[int]]) -> None:
        if number_and_candidate(rows[0])[0] == 2:
            self.close()
        super().tell(rows)


def killed(rank: int, world_size: int) -> str:
    """Stage 1 is killed in the middle of a step; what the others raise."""
    own = part(rank)
    if rank == 1:
        _kill_in_forward(own, 9)
    stage = PipelineStage(own, rank, world_size, torch.device("cpu"))
    steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    PipelineRuntime(PipelineSteps(steps), grouped(world_size, MICRO_BATCHES, 2))
    try:
        for number in range(STEPS):
            one_step(steps, rank, world_size, number)
    except CommunicationError as error:
        return str(error)
    return "nothing was raised"


def replica_killed(rank: int, world_size: int) -> str:
    """Two pipelines of two stages; the second stage's replica on rank 3 is killed in the middle of a step."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "pipeline"))
    model = nn.Sequential(*(part(stage) for stage in range(2)))
    planned = headway.strategy("pipeline", micro_batches=MICRO_BATCHES, split_points=("1",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained: Any = headway.parallelize(model, optimizer, planned, loss_fn=nn.functional.mse_loss, mesh=mesh)
    if rank == world_size - 1:
        _kill_in_forward(trained.stage, 9)
    try:
        for number in range(STEPS):
            trained.train_step(*batch(number))
    except CommunicationError as error:
        return str(error)
    return "nothing was raised"


def missing(rank: int, world_size: int, when: str) -> str:
    """Rank 1 ends before the first step, or before the model is cut; what the other raises."""
    if rank == 1 and when == "before the cut":
        os._exit(3)
    try:
        stage = PipelineStage(part(rank), rank, world_size, torch.device("cpu"))
        steps = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        if when == "before the cut":
            model = nn.Sequential(part(0), part(1))
            planned = headway.strategy("pipeline", micro_batches=MICRO_BATCHES)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            headway.parallelize(model, optimizer, planned, loss_fn=nn.functional.mse_loss)
        PipelineRuntime(PipelineSteps(steps), grouped(world_size, MICRO_BATCHES, 2))
        if rank == 1:
            os._exit(3)
        one_step(steps, rank, world_size, 0)
    except CommunicationError as error:
        return str(error)
    return "nothing was raised"


def _kill_in_forward(module: nn.Module, forwards: int) -> None:
    calls = iter(range(forwards))

    def count(*_: Any) -> None:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    module.register_forward_pre_hook(count)
