"""Prepares the job's details for the HTML page: facts, title, memory picture, and the tables of its parts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.diagnosis import Diagnosis
from headway.diagnosis.buckets import BucketTimes
from headway.diagnosis.details import Details, JobIdentity
from headway.diagnosis.memory import MemoryPoint, StepMemory
from headway.report import words
from headway.units import counted, format_bytes

WIDTH, HEIGHT, LEFT, TOP, AXIS = 1000.0, 240.0, 64.0, 20.0, 22.0
TICKS = 6
_PASSES = ("gradients", "activations and temporary tensors")


@dataclass(frozen=True, slots=True)
class MemoryPicture:
    """Areas (name, colour, outline, bytes at the peak), marks of time and bytes, and the peak (x, y, text)."""

    title: str
    areas: tuple[tuple[str, str, str, str], ...]
    marks: tuple[tuple[float, str], ...]
    levels: tuple[tuple[float, str], ...]
    peak: tuple[float, float, str]

    width: float = WIDTH
    height: float = HEIGHT + TOP + AXIS
    left: float = LEFT


def memory_picture(memory: StepMemory) -> MemoryPicture | None:
    """The picture; None if only the peak is known."""
    peak = memory.peak
    if peak is None:
        return None
    points = memory.points
    start_ms, end_ms = points[0].ms, points[-1].ms
    across = (WIDTH - LEFT) / max(end_ms - start_ms, 1e-9)
    top_bytes = 1.04 * max(memory.peak_bytes, 1)
    up = HEIGHT / top_bytes
    layers = [
        *(
            (name, [size_bytes] * len(points), size_bytes)
            for name, size_bytes in memory.constant_bytes.items()
        ),
        (_PASSES[0], [point.gradient_bytes for point in points], peak.gradient_bytes),
        (_PASSES[1], [point.working_bytes for point in points], peak.working_bytes),
    ]
    xs = [LEFT + (point.ms - start_ms) * across for point in points]
    below = [0] * len(points)
    areas = []
    for name, sizes, at_peak in layers:
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        outline = _outline(xs, [_y(low, up) for low in below], [_y(high, up) for high in above])
        areas.append((name, words.MEMORY_COLOURS[name], outline, format_bytes(at_peak)))
        below = above
    at = points.index(peak)
    held = sum(memory.constant_bytes.values()) + peak.gradient_bytes + peak.working_bytes
    return MemoryPicture(
        title=f"Memory of a rank over a step: at most {format_bytes(memory.peak_bytes)}",
        areas=tuple(areas),
        marks=tuple(
            (LEFT + (WIDTH - LEFT) * part / TICKS, words.duration(start_ms + (end_ms - start_ms) * part / TICKS))
            for part in range(TICKS + 1)
        ),
        levels=tuple(
            (_y(top_bytes * part / 4, up), format_bytes(top_bytes * part / 4)) for part in range(1, 4)
        ),
        peak=((xs[max(at - 1, 0)] + xs[at]) / 2, _y(held, up), peak_words(peak)),
    )  # fmt: skip


def peak_words(peak: MemoryPoint) -> str:
    """Says when the peak occurs."""
    if peak.what.startswith("gradient of "):
        return f"just before the {words.plain(peak.what, 80)} is complete"
    return f"in {words.plain(peak.what, 80)}" if peak.what else "at the start of forward"


def _y(size_bytes: float, up: float) -> float:
    return TOP + HEIGHT - size_bytes * up


def _outline(xs: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> str:
    """The polygon between two step curves; each value holds from the previous point to its own."""

    def steps(ys: Sequence[float]) -> list[str]:
        corners = [(xs[0], ys[0])]
        for before, x, y in zip(xs, xs[1:], ys[1:], strict=False):
            corners += [(before, y), (x, y)]
        return [f"{x:.1f},{y:.1f}" for x, y in corners]

    return " ".join([*steps(highs), *reversed(steps(lows))])


MAX_BUCKETS = 40
SHOWN_MODULES, MAX_MODULES = 12, 300
MAX_STAGES = 64


class Fact(NamedTuple):
    """A fact about the job. ``is_code`` marks text to copy."""

    label: str
    text: str
    is_code: bool = False


class BucketRows(NamedTuple):
    """The listed buckets in launch order; the buckets left out are no more exposed than these."""

    listed: tuple[BucketTimes, ...]
    left_out: int
    left_out_ms: float
    names_collectives: bool


def job_values(diagnosis: Diagnosis) -> dict[str, Any]:
    """The template's values for the details of ``diagnosis``; only ``job: None`` without details."""
    details = diagnosis.details
    if details is None:
        return {"job": None}
    modules = details.modules[:MAX_MODULES]
    return {
        "job": details.job,
        "facts": facts(details.job, diagnosis.steps),
        "not_observed": details.not_observed,
        "buckets": bucket_rows(details.buckets),
        "bucket_members": bucket_members,
        "first_modules": modules[:SHOWN_MODULES],
        "other_modules": modules[SHOWN_MODULES:],
        "modules_left_out": len(details.modules) - len(modules),
        "shows_kept_memory": any(module.kept_bytes is not None for module in details.modules),
        **_memory_values(details),
    }


def facts(job: JobIdentity, steps: Sequence[int]) -> list[Fact]:
    """The job in a few lines, without unknown facts."""
    hosts = _listed(job.hosts, 4)
    where = f"{counted(job.world_size, 'rank')} on {counted(len(job.hosts), 'host')}"
    software = [f"{job.framework} {_listed(job.versions, 3)}".strip()]
    software += [f"backend {_listed(job.backends, 3)}"] if job.backends else []
    hardware = [_listed(job.devices, 4)] if job.devices else []
    hardware += [f"{counted(job.threads, 'thread')} a rank"] if job.threads else []
    hardware += [f"{counted(job.cores, 'core')} for all ranks of a host"] if job.cores else []
    rows = [
        Fact("Command", words.plain(job.command, 2000), is_code=True),
        Fact("Recorded", _when(job.recorded_at)),
        Fact("Model", model_words(job)),
        Fact("Ranks", f"{where} ({hosts})" if hosts else where),
        Fact("Software", ", ".join(software)),
        Fact("Hardware", ", ".join(hardware)),
        Fact(
            "Plan in force",
            plan_words(job.plan) or ("" if job.model_bytes == 0 else "none known to Headway"),
        ),
        Fact("In this trace", f"{_steps(steps)}; level of detail: {job.detail}"),
    ]
    return [fact for fact in rows if fact.text]


def page_title(job: JobIdentity | None, trace_name: str) -> str:
    """A title that distinguishes reports: trace, script, ranks, plan and date."""
    if job is None:
        return trace_name
    script = next((word for word in _words_of(job.command) if word.endswith(".py")), "")
    ranks = counted(job.world_size, "rank")
    parts = [script or job.model, ranks, ", ".join(job.plan), _when(job.recorded_at)]
    return f"{trace_name} ({', '.join(filter(None, parts))})"


def model_words(job: JobIdentity) -> str:
    """Summarises the model: class, parameters and bytes."""
    if not job.parameters:
        return job.model
    sizes = f"{_many(job.parameters)} parameters in {counted(job.parameter_tensors, 'tensor')}, "
    sizes += f"{format_bytes(job.model_bytes)} of {_listed(job.dtypes, 3)}"
    frozen = f", and {format_bytes(job.frozen_bytes)} frozen" if job.frozen_bytes else ""
    return f"{words.plain(job.model, 100)}: {sizes}{frozen}" if job.model else f"{sizes}{frozen}"


def plan_words(plan: Mapping[str, Mapping[str, Any]]) -> str:
    """The strategies in force, with the options that are set."""
    strategies = []
    for name, options in plan.items():
        chosen = ", ".join(f"{option}={value}" for option, value in options.items() if value is not None)
        strategies.append(f"{name} ({words.plain(chosen, 300)})" if chosen else name)
    return " and ".join(strategies)


def bucket_rows(buckets: Sequence[BucketTimes]) -> BucketRows:
    """Lists the buckets, or the MAX_BUCKETS most exposed ones."""
    most = sorted(buckets, key=lambda bucket: -bucket.exposed_ms)[:MAX_BUCKETS]
    listed = (
        tuple(bucket for bucket in buckets if bucket in most)
        if len(buckets) > MAX_BUCKETS
        else tuple(buckets)
    )
    return BucketRows(
        listed=listed,
        left_out=len(buckets) - len(listed),
        left_out_ms=sum(bucket.exposed_ms for bucket in buckets)
        - sum(bucket.exposed_ms for bucket in listed),
        names_collectives=len({bucket.collective for bucket in buckets}) > 1,
    )


def bucket_members(bucket: BucketTimes) -> str:
    """A bucket's number of parameters, and the first and last of them."""
    names = bucket.parameters
    if len(names) < 2:
        return "".join(names)
    return f"{len(names)}: {words.plain(names[0], 60)} … {words.plain(names[-1], 60)}"


def _memory_values(details: Details) -> dict[str, Any]:
    single = details.memory[0] if len(details.memory) == 1 else None
    picture = None if single is None else memory_picture(single)
    peak = None if single is None else single.peak
    return {
        "memory": picture,
        "memory_peak": "" if single is None else format_bytes(single.peak_bytes),
        "memory_when": "" if peak is None else peak_words(peak),
        "stage_memory": [] if picture is not None else details.memory[:MAX_STAGES],
    }


def _words_of(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # cut within quotes
        return command.split()


def _listed(texts: Sequence[str], most: int) -> str:
    return ", ".join(words.plain(text, 80) for text in texts[:most]) + (", …" if len(texts) > most else "")


def _many(number: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} ({len(steps)})"


def _when(moment: str) -> str:
    """Formats ``2026-11-28T18:25:01Z`` as ``2026-11-28 18:25 UTC``."""
    return f"{moment[:16].replace('T', ' ')} UTC" if moment else ""
