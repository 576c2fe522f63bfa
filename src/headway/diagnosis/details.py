"""Collects the details of a diagnosis: the job's identity, buckets, modules, memory, and what was not recorded."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headway.diagnosis.breakdown import RankTime
from headway.diagnosis.buckets import BucketTimes, bucket_times
from headway.diagnosis.communication import Communications
from headway.diagnosis.memory import StepMemory, step_memory
from headway.diagnosis.modules import ModuleTimes, module_times
from headway.trace.events import Events, Kind
from headway.trace.format import RankInfo, Trace

MAX_COMMAND = 4000  # characters
BUSY = 1.25  # times the cores: the load from which the machine counts as busy with other work


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Describes the job of a trace. Unknown fields are empty or 0.

    ``plan`` maps each strategy in force to its options. ``detail`` names the level of detail of recorded computation.
    ``cores`` counts the cores of all ranks on the first host, ``threads`` torch's threads on one rank. ``contention`` is
    a sentence if the recording shows that cores were oversubscribed or busy.
    """

    trace: str
    command: str
    recorded_at: str
    run: str
    framework: str
    versions: tuple[str, ...]
    model: str
    parameters: int
    parameter_tensors: int
    model_bytes: int
    frozen_bytes: int
    dtypes: tuple[str, ...]
    world_size: int
    hosts: tuple[str, ...]
    backends: tuple[str, ...]
    devices: tuple[str, ...]
    threads: int
    cores: int
    plan: dict[str, dict[str, Any]]
    detail: str
    contention: str = ""

    def to_document(self) -> dict[str, Any]:
        """As ``headway diagnose --json`` prints it."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }


def job_identity(trace: Trace) -> JobIdentity:
    """Reads the job's identity from ``trace``."""
    ranks, models = trace.manifest.ranks, trace.stages or (trace.model,)
    manifest = trace.manifest.model_dump(mode="json", include={"command", "recorded_at"})
    first = min(ranks, key=lambda info: info.rank, default=None)
    parameters = [parameter for model in models for parameter in model.parameters]
    plan: dict[str, dict[str, Any]] = {}
    for info in ranks:
        plan.update(info.strategy)
    return JobIdentity(
        trace=trace.path.resolve().name,
        command=shlex.join(manifest.get("command", ()))[:MAX_COMMAND],
        recorded_at=manifest.get("recorded_at") or "",
        run=trace.manifest.run,
        framework=trace.manifest.framework,
        versions=_different(info.version for info in ranks),
        model=models[0].class_name if len(models) == 1 else "",
        parameters=sum(parameter.numel for parameter in parameters),
        parameter_tensors=len(parameters),
        model_bytes=sum(parameter.size_bytes for parameter in parameters),
        frozen_bytes=sum(model.frozen_bytes for model in models),
        dtypes=_different(parameter.dtype for parameter in parameters),
        world_size=trace.world_size,
        hosts=_different(info.host for info in ranks),
        backends=_different(info.backend for info in ranks),
        devices=_different(info.device for info in ranks),
        threads=first.threads if first is not None else 0,
        cores=len(_cores(info for info in ranks if first is not None and info.host == first.host)),
        plan=plan,
        detail=level_of_detail(trace.events.values()),
        contention=contention(ranks),
    )


def level_of_detail(ranks: Iterable[Events]) -> str:
    """The level of detail at which computation was recorded."""
    kinds: set[str] = set()
    for events in ranks:
        kinds |= set(events.kind.tolist())
    modules, operators = Kind.FORWARD in kinds, Kind.OPERATOR in kinds
    if modules:
        return "modules and operators" if operators else "modules"
    if operators:
        return "operators and kernels"
    return "passes" if kinds & {Kind.FORWARD_PASS, Kind.BACKWARD_PASS} else "communication only"


def contention(ranks: Iterable[RankInfo]) -> str:
    """A sentence if some host's cores are oversubscribed or were busy with other work; empty otherwise."""
    of_host: dict[str, list[RankInfo]] = {}
    for info in ranks:
        of_host.setdefault(info.host, []).append(info)
    for host, infos in of_host.items():
        cores = len(_cores(infos))
        threads = sum(info.threads for info in infos if info.device in ("", "cpu"))
        if not cores:
            continue
        many = f"{len(infos)} ranks" if len(infos) > 1 else "one rank"
        if threads > cores:
            return (
                f"CPU cores are oversubscribed: the {many} on {host} use {threads} threads on {cores} cores. Set "
                "OMP_NUM_THREADS so that all threads fit."
            )
        load = max((info.load for info in infos if info.load is not None), default=0.0)
        if load > BUSY * max(cores, threads):
            return (
                f"{host} was busy with other work: load {load:.1f} on {cores} cores, of which {many} used {threads} "
                "threads. Record again on an idle machine before you trust small differences."
            )
    return ""


def not_observed(trace: Trace, *, has_modules: bool, has_memory: bool, has_buckets: bool) -> tuple[str, ...]:
    """Sentences on missing data that a report or a prediction would use."""
    sentences = []
    kinds = {kind for events in trace.events.values() for kind in set(events.kind.tolist())}
    imported = any(info.source for info in trace.manifest.ranks)
    if trace.missing_ranks:
        count = len(trace.missing_ranks)
        which = ", ".join(map(str, trace.missing_ranks[:8])) + (", …" if count > 8 else "")
        sentences.append(f"{count} of {trace.world_size} ranks: no file for rank{'s' * (count > 1)} {which}.")
    if not has_modules:
        sentences.append("Modules: forward and backward were not timed per module.")
    if Kind.OPERATOR not in kinds:
        sentences.append("Operators and kernels: record them with --detail operators or --detail kernels.")
    if not trace.model.parameters and not trace.stages:
        sentences.append("The model: the trace does not list parameters and their sizes.")
    elif has_buckets and Kind.GRADIENT_READY not in kinds:
        sentences.append("Gradients: the times at which they become ready.")
    if not has_memory:
        sentences.append("Memory: recorded only on CPUs under stock DDP, without compiled modules.")
    if Kind.INPUT not in kinds:
        sentences.append("Waiting for input: the job used no torch data loader.")
    if trace.cluster is None:
        why = (
            ""
            if imported
            else " (headway record measures them after the last step, unless --no-measuring is given)"
        )
        sentences.append(
            f"Links and cores: not measured{why}; predictions estimate them from the recorded steps."
        )
    return tuple(sentences)


def _cores(ranks: Iterable[RankInfo]) -> set[int]:
    """The cores that ``ranks`` may use; all ranks are on one host."""
    return {
        core for info in ranks for low, high in info.cores for core in range(low, min(high, low + 65_536) + 1)
    }


def _different(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


MAX_MODULES = 1000  # in a document


@dataclass(frozen=True, slots=True)
class Details:
    """The reference part of a diagnosis: the job, its buckets and modules, and its memory.

    ``memory`` has one entry per pipeline stage, a single entry for other jobs, and is empty if memory was not recorded.
    """

    job: JobIdentity
    buckets: tuple[BucketTimes, ...]
    modules: tuple[ModuleTimes, ...]
    memory: tuple[StepMemory, ...]
    not_observed: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """The fields for ``headway diagnose --json``, with at most MAX_MODULES modules, the slowest first."""
        return {
            "job": self.job.to_document(),
            "buckets": [bucket.to_document() for bucket in self.buckets],
            "modules": [module.to_document() for module in self.modules[:MAX_MODULES]],
            "memory": [memory.to_document() for memory in self.memory],
            "not_observed": list(self.not_observed),
        }


def find_details(trace: Trace, times: Mapping[int, RankTime], rows: Communications) -> Details:
    """Collects the details of ``trace``; ``rows`` is its matched communication."""
    buckets = bucket_times(trace, times, rows)
    modules = module_times(trace, times)
    memory = step_memory(trace, times)
    return Details(
        job=job_identity(trace),
        buckets=buckets,
        modules=modules,
        memory=memory,
        not_observed=not_observed(
            trace, has_modules=bool(modules), has_memory=bool(memory), has_buckets=bool(buckets)
        ),
    )
