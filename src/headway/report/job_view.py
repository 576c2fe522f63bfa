"""What a page says of the job itself: facts, a title that tells two reports apart, and the tables of its parts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headway.diagnosis import Diagnosis
from headway.diagnosis.buckets import BucketTimes
from headway.diagnosis.details import Details
from headway.diagnosis.identity import JobIdentity
from headway.report import words
from headway.report.memory_picture import memory_picture, peak_words
from headway.units import counted, format_bytes

MAX_BUCKETS = 40
SHOWN_MODULES, MAX_MODULES = 12, 300
MAX_STAGES = 64


class Fact(NamedTuple):
    """Something about the job; ``is_code`` where people may paste it."""

    label: str
    text: str
    is_code: bool = False


class BucketRows(NamedTuple):
    """The buckets that are listed, in the order of their launch; the others are no more exposed than these."""

    listed: tuple[BucketTimes, ...]
    left_out: int
    left_out_ms: float
    names_collectives: bool


def job_values(diagnosis: Diagnosis) -> dict[str, Any]:
    """What templates say of ``diagnosis``'s details; nothing of one that has none."""
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
        "keeps_known": any(module.kept_bytes is not None for module in details.modules),
        **_memory_values(details),
    }


def facts(job: JobIdentity, steps: Sequence[int]) -> list[Fact]:
    """The job in a few lines; what is not known is left out."""
    hosts = _listed(job.hosts, 4)
    where = f"{counted(job.world_size, 'rank')} on {counted(len(job.hosts), 'host')}"
    software = [f"{job.framework} {_listed(job.versions, 3)}".strip()]
    software += [f"backend {_listed(job.backends, 3)}"] if job.backends else []
    hardware = [_listed(job.devices, 4)] if job.devices else []
    hardware += [f"{counted(job.threads, 'thread')} a rank"] if job.threads else []
    hardware += [f"{counted(job.cores, 'core')} for all ranks of a host"] if job.cores else []
    found = [
        Fact("Command", words.plain(job.command, 2000), is_code=True),
        Fact("Recorded", _when(job.recorded_at)),
        Fact("Model", model_words(job)),
        Fact("Ranks", f"{where} ({hosts})" if hosts else where),
        Fact("Software", ", ".join(software)),
        Fact("Hardware", ", ".join(hardware)),
        Fact(
            "Plan in force",
            plan_words(job.plan) or ("" if job.model_bytes == 0 else "none that Headway knows"),
        ),
        Fact("In this trace", f"{_steps(steps)}; level of detail: {job.detail}"),
    ]
    return [fact for fact in found if fact.text]


def page_title(job: JobIdentity | None, trace_name: str) -> str:
    """What tells two reports apart: the trace, what was run, on how many ranks, under which plan, and when."""
    if job is None:
        return trace_name
    script = next((word for word in _words_of(job.command) if word.endswith(".py")), "")
    ranks = counted(job.world_size, "rank")
    parts = [script or job.model, ranks, ", ".join(job.plan), _when(job.recorded_at)]
    return f"{trace_name} ({', '.join(filter(None, parts))})"


def model_words(job: JobIdentity) -> str:
    """The model in a few words."""
    if not job.parameters:
        return job.model
    sizes = f"{_many(job.parameters)} parameters in {counted(job.parameter_tensors, 'tensor')}, "
    sizes += f"{format_bytes(job.model_bytes)} of {_listed(job.dtypes, 3)}"
    frozen = f", and {format_bytes(job.frozen_bytes)} frozen" if job.frozen_bytes else ""
    return f"{words.plain(job.model, 100)}: {sizes}{frozen}" if job.model else f"{sizes}{frozen}"


def plan_words(plan: Mapping[str, Mapping[str, Any]]) -> str:
    """The strategies in force, with the options that are set."""
    found = []
    for name, options in plan.items():
        chosen = ", ".join(f"{option}={value}" for option, value in options.items() if value is not None)
        found.append(f"{name} ({words.plain(chosen, 300)})" if chosen else name)
    return " and ".join(found)


def bucket_rows(buckets: Sequence[BucketTimes]) -> BucketRows:
    """Of many buckets, those that are most exposed."""
    most = sorted(buckets, key=lambda one: -one.exposed_ms)[:MAX_BUCKETS]
    listed = tuple(one for one in buckets if one in most) if len(buckets) > MAX_BUCKETS else tuple(buckets)
    return BucketRows(
        listed=listed,
        left_out=len(buckets) - len(listed),
        left_out_ms=sum(one.exposed_ms for one in buckets) - sum(one.exposed_ms for one in listed),
        names_collectives=len({one.collective for one in buckets}) > 1,
    )


def bucket_members(bucket: BucketTimes) -> str:
    """How many parameters a bucket has, and which come first and last."""
    names = bucket.parameters
    if len(names) < 2:
        return "".join(names)
    return f"{len(names)}: {words.plain(names[0], 60)} … {words.plain(names[-1], 60)}"


def _memory_values(details: Details) -> dict[str, Any]:
    whole = details.memory[0] if len(details.memory) == 1 else None
    picture = None if whole is None else memory_picture(whole)
    peak = None if whole is None else whole.peak
    return {
        "memory": picture,
        "memory_peak": "" if whole is None else format_bytes(whole.peak_bytes),
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
    """``2026-11-28 18:25 UTC`` of ``2026-11-28T18:25:01Z``."""
    return f"{moment[:16].replace('T', ' ')} UTC" if moment else ""
