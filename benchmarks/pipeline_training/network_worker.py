"""One rank of a paced pipeline on a network that others use: every method on the same stage's module, in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import order_of
from lab_clock import since_lab_s
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from headway.scheduling.pipeline.schedule import Pass
from headway.strategies.pipeline.policy import PipelineStrategy
from headway.strategies.pipeline.runtime import PipelineRuntime, StepWatch
from headway.strategies.pipeline.tuning.follower import Follower
from headway.strategies.pipeline.tuning.observed import RankStep
from headway.torch_private.pipelining import PipelineSteps
from pipeline_training.measured import cpu_s, message_ms, stream_ms
from pipeline_training.network_cases import CASES, PHASE_S, NetworkCase
from pipeline_training.stepping import mean_loss, stage_of, step_of

SIZES = (2, 4, 8)
ROUNDS, STEPS, WARM_STEPS = 5, 3, 2
QUICK_ROUNDS = 2
LEARNING_STEPS = 6  # of a method that learns: what it does in its first steps is not what is compared
WATCHED = "1f1b"  # whose passes replay is told of, as in a recording of it
PHASE_METHODS = ("1f1b", "k=2", "k=4", "headway")
STOCK = {"torch-1f1b": Schedule1F1B, "torch-gpipe": ScheduleGPipe}


def strategies(case: NetworkCase) -> dict[str, PipelineStrategy]:
    """What Headway's runtime is given, by the method's name."""
    count = case.micro_batches
    sizes = tuple(size for size in SIZES if size < count and (size < 8 or not case.is_phases))
    orders = {
        order: PipelineStrategy(order=order, micro_batches=count)
        for order in ("1f1b", "gpipe", "eager-1f1b", "zero-bubble")
    }
    groups = {
        f"k={size}": PipelineStrategy(order="kfkb", group_size=size, micro_batches=count) for size in sizes
    }
    others: tuple[Any, ...] = () if case.is_phases else ("eager-1f1b", "zero-bubble")
    follows = PipelineStrategy(order="kfkb", group_sizes=sizes, other_orders=others, micro_batches=count)
    found = {**orders, **groups, "headway": follows}
    return {name: found[name] for name in PHASE_METHODS} if case.is_phases else found


@dataclass
class Block:
    """Consecutive steps of one method: when each began (s after the lab), and how long it took."""

    begins_s: list[float] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass
class Method:
    """One way to train the stage."""

    step: Callable[[], None]
    follower: Follower | None = None
    seen: list[RankStep] = field(default_factory=list)  # this rank's steps, where they are watched
    blocks: list[Block] = field(default_factory=list)


def work(case_name: str, out: Path, *, quick: bool) -> None:
    """Measure every method of a case, interleaved; rank 0 writes what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[case_name]
    size_bytes = case.model.boundary_bytes[0]
    found: dict[str, Any] = {"message_ms": message_ms(size_bytes), "stream_ms": stream_ms(size_bytes)}
    stage = stage_of(case)
    methods = _methods(case, stage)
    for method in methods.values():
        for _ in range(LEARNING_STEPS if method.follower else WARM_STEPS):
            method.step()
    begun, used = time.monotonic(), cpu_s()
    names = list(methods)
    for number in range(QUICK_ROUNDS if quick else ROUNDS):
        for name in (names[each] for each in order_of(number, len(names))):
            methods[name].blocks.append(_block(case, methods[name]))
    found["cpu"] = (
        (cpu_s() - used) * dist.get_world_size() / (time.monotonic() - begun) / (os.cpu_count() or 1)
    )
    found["passes_ms"] = _from_every_rank(_passes_ms(methods[WATCHED].seen))
    found["methods"] = {}
    for name, method in methods.items():
        peaks = _from_every_rank([float(block.peak_bytes) for block in method.blocks])
        for block, *each in zip(method.blocks, *peaks, strict=True):
            block.peak_bytes = round(max(each))
        found["methods"][name] = [asdict(block) for block in method.blocks]
        if method.follower is not None:
            found["decisions"] = [
                {"step": each.step, "before": each.before, "candidate": each.candidate, "reason": each.reason,
                 "predicted_ms": each.predicted_ms, "measured_ms": each.measured_ms,
                 "links_gbps": {f"{a}>{b}": gbps for (a, b), gbps in each.links_gbps.items()}}
                for each in method.follower.decisions
            ]  # fmt: skip
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # torch's groups wait for each other at length otherwise


def _methods(case: NetworkCase, module: nn.Module) -> dict[str, Method]:
    rank, stages, count = dist.get_rank(), case.stages, case.micro_batches
    found = {}
    planned = strategies(case)
    for name in (*(() if case.is_phases else STOCK), *planned):
        stage = PipelineStage(module, rank, stages, torch.device("cpu"))
        steps = STOCK.get(name, ScheduleGPipe)(stage, count, loss_fn=mean_loss)
        follower, seen = None, list[RankStep]()
        if name in planned:
            own = PipelineSteps(steps)
            runtime = PipelineRuntime(own, planned[name].schedule_of(stages))
            follower = Follower(own, runtime, planned[name]) if planned[name].follows_network else None
            if name == WATCHED:
                _watch(runtime, seen)
        found[name] = Method(step_of(case, module, steps), follower, seen)
    return found


def _watch(runtime: PipelineRuntime, seen: list[RankStep]) -> None:
    """Keep what this rank sees of its steps, as a recording would."""
    watch = StepWatch()

    def nothing() -> None: ...

    runtime.observe(watch, nothing, lambda: seen.append(watch.ended()))


def _passes_ms(seen: Sequence[RankStep]) -> list[float]:
    """The median forward and backward of this rank's steps."""
    took_ms: dict[Pass, list[float]] = {Pass.FORWARD: [], Pass.BACKWARD: []}
    for step in seen:
        for action, span in step.passes.items():
            took_ms[action.kind].append((span.end_ns - span.begin_ns) / 1e6)
    return [median(each) for each in took_ms.values()]


def _block(case: NetworkCase, method: Method) -> Block:
    """Some steps, or those of a whole cycle of phases, from wherever in it."""
    block = Block()
    dist.barrier()
    ends_s = _agreed(since_lab_s()) + 2 * PHASE_S
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    before_bytes = _status_bytes("VmRSS")
    while len(block.took_ms) < STEPS or (case.is_phases and _agreed(since_lab_s()) < ends_s):
        begin_s = since_lab_s()
        method.step()
        block.begins_s.append(begin_s)
        block.took_ms.append((since_lab_s() - begin_s) * 1e3)
    block.peak_bytes = _status_bytes("VmHWM") - before_bytes
    return block


def _agreed(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(found, 0)
    return float(found)


def _from_every_rank(values: list[float]) -> list[list[float]]:
    mine = torch.tensor(values, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [each.tolist() for each in found]


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
