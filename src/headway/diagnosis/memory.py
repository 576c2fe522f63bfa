"""Reconstructs a rank's memory over a step from the recorded memory of one forward and backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from headway.diagnosis.breakdown import NS_A_MS, RankTime
from headway.diagnosis.buckets import in_steps
from headway.model import ModelSpec, ModuleMemory, StageMemory
from headway.strategies.footprint import AFTER, FORWARD, UPDATE, Footprint, constant_bytes, held_moments
from headway.trace.events import Kind
from headway.trace.format import Trace

MAX_POINTS = 2000  # per curve, in JSON and on a page


class MemoryPoint(NamedTuple):
    """The memory held until ``ms`` after the step's start, when ``what`` ends.

    ``working_bytes`` are activations and temporary tensors.
    """

    ms: float
    gradient_bytes: int
    working_bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a rank over a mean step: constant parts by name, plus ``points`` over time.

    It applies to all ``ranks``. For a pipeline stage only ``peak_bytes`` is known, and ``points`` is empty.
    """

    ranks: tuple[int, ...]
    constant_bytes: Mapping[str, int]
    peak_bytes: int
    points: tuple[MemoryPoint, ...] = ()

    @property
    def peak(self) -> MemoryPoint | None:
        """The point with the most memory; None without points."""
        return max(self.points, key=lambda point: point.gradient_bytes + point.working_bytes, default=None)

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            "ranks": list(self.ranks),
            "peak_bytes": self.peak_bytes,
            "constant_bytes": dict(self.constant_bytes),
            "points": [{**point._asdict(), "ms": round(point.ms, 6)} for point in self.points[:MAX_POINTS]],
        }


def step_memory(trace: Trace, times: Mapping[int, RankTime]) -> tuple[StepMemory, ...]:
    """The memory of a rank, one entry per pipeline stage; empty if memory was not recorded."""
    if trace.stages:
        of_stages = trace.ranks_of_stages
        pairs = zip(of_stages.values(), trace.stages, strict=False)
        stages = (_of_stage(ranks, model, model.stage_memory) for ranks, model in pairs)
        return tuple(stage for stage in stages if stage is not None)
    model = trace.model
    if model.pass_memory is None:
        return ()
    held = Footprint(
        buffers_bytes=model.size_bytes,  # memory is recorded only under stock DDP, whose buckets hold every gradient
        state_bytes=model.optimizer_state_bytes,
        gradients_apart=model.pass_memory.gradients_apart,
        updated_share=1.0,
    )
    moments = list(held_moments(model, held))
    most = max(moment.gradient_bytes + moment.working_bytes for moment in moments)
    constant = {**_constant(model), "DDP's buckets": held.buffers_bytes}
    return (
        StepMemory(
            ranks=tuple(sorted(trace.events)),
            constant_bytes={what: size_bytes for what, size_bytes in constant.items() if size_bytes},
            peak_bytes=constant_bytes(model, held) + most,
            points=_points(model, held, _mean_moments_ms(trace, times)),
        ),
    )


def _constant(model: ModelSpec) -> dict[str, int]:
    return {
        "parameters": model.size_bytes + model.frozen_bytes,
        "optimizer state": model.optimizer_state_bytes,
        "buffers": model.buffer_bytes,
    }


def _of_stage(ranks: tuple[int, ...], model: ModelSpec, memory: StageMemory | None) -> StepMemory | None:
    if memory is None or not memory.step_bytes:
        return None
    constant = {what: size_bytes for what, size_bytes in _constant(model).items() if size_bytes}
    return StepMemory(ranks, constant, sum(constant.values()) + memory.step_bytes)


def _points(model: ModelSpec, held: Footprint, at_ms: Mapping[str, float]) -> tuple[MemoryPoint, ...]:
    """The curve of one step in time order. A moment without a recorded time takes the time of the one before."""
    assert model.pass_memory is not None
    points: list[MemoryPoint] = []
    now_ms = at_ms.get(Kind.FORWARD_PASS, 0.0)
    for moment in held_moments(model, held):
        if moment.what == FORWARD:
            points.append(MemoryPoint(now_ms, moment.gradient_bytes, 0, ""))
            for call in _innermost(model.pass_memory.modules):
                now_ms = max(now_ms, at_ms.get(f"{Kind.FORWARD} {call.module}", now_ms))
                points.append(MemoryPoint(now_ms, moment.gradient_bytes, call.peak_bytes, call.module))
            if not model.pass_memory.modules:
                now_ms = max(now_ms, at_ms.get(FORWARD, now_ms))
                points.append(MemoryPoint(now_ms, *moment[1:], FORWARD))
            continue
        now_ms = max(now_ms, at_ms.get(moment.what, now_ms))
        what = f"gradient of {moment.what}" if moment.what in model.by_name else moment.what
        points.append(MemoryPoint(now_ms, moment.gradient_bytes, moment.working_bytes, what))
    every = -(-len(points) // MAX_POINTS)
    groups = (points[at : at + every] for at in range(0, len(points), every))
    return tuple(
        max(group, key=lambda point: point.gradient_bytes + point.working_bytes)._replace(ms=group[-1].ms)
        for group in groups
    )


def _innermost(calls: tuple[ModuleMemory, ...]) -> list[ModuleMemory]:
    """The calls without nested calls: the call that follows is not to a submodule."""
    return [
        call
        for call, after in zip_longest(calls, calls[1:])
        if after is None or not after.module.startswith(f"{call.module}.")
    ]


def _mean_moments_ms(trace: Trace, times: Mapping[int, RankTime]) -> dict[str, float]:
    """The mean times of the first rank's moments in ms: module forwards, gradients and the update."""
    rank = min(times)
    time = times[rank]
    moments: dict[str, list[int]] = {}
    wanted = (Kind.FORWARD_PASS, Kind.FORWARD, Kind.GRADIENT_READY, Kind.OPTIMIZER)
    rows = trace.events[rank].of_kind(*wanted)
    within, step = in_steps(time, rows.start_ns)
    since = rows.start_ns - time.step_start_ns[step]
    for kind, name, start_ns, length_ns, inside in zip(
        rows.kind.tolist(), rows.name.tolist(), since.tolist(), rows.duration_ns.tolist(), within.tolist(), strict=True
    ):  # fmt: skip
        if not inside:
            continue
        end_ns = start_ns + length_ns
        if kind == Kind.FORWARD_PASS:
            moments.setdefault(Kind.FORWARD_PASS, []).append(start_ns)
            moments.setdefault(FORWARD, []).append(end_ns)
        elif kind == Kind.FORWARD:
            moments.setdefault(f"{Kind.FORWARD} {name}", []).append(end_ns)
        elif kind == Kind.OPTIMIZER:
            moments.setdefault(AFTER, []).append(start_ns)
            moments.setdefault(UPDATE, []).append(end_ns)
        else:
            moments.setdefault(name, []).append(start_ns)
    return {what: fmean(moment) / NS_A_MS for what, moment in moments.items()}
