"""What a diagnosis has besides causes: the job's identity, its buckets, modules and memory, and what was not seen."""

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
BUSY = 1.25  # times as much load as cores, where what the job itself asks for fits


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The job of a trace. What is not known is empty, 0 or None.

    ``plan`` has the options of each strategy in force, by its name; ``detail`` says what was recorded of computation.
    ``cores`` are how many the ranks of the first host have together, and ``threads`` how many torch computes with on
    each rank. ``contention`` says in a sentence that ranks take cores from each other, where the recording shows it.
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
    """What ``trace`` tells of its job."""
    ranks, models = trace.manifest.ranks, trace.stages or (trace.model,)
    told = trace.manifest.model_dump(mode="json", include={"command", "recorded_at"})
    first = min(ranks, key=lambda info: info.rank, default=None)
    parameters = [parameter for model in models for parameter in model.parameters]
    plan: dict[str, dict[str, Any]] = {}
    for info in ranks:
        plan.update(info.strategy)
    return JobIdentity(
        trace=trace.path.resolve().name,
        command=shlex.join(told.get("command", ()))[:MAX_COMMAND],
        recorded_at=told.get("recorded_at") or "",
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
    """What was recorded of computation, in words."""
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
    """In a sentence, that the cores of a host have more to do than they can; empty where nothing shows it."""
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
                f"The {many} on {host} compute with {threads} threads on {cores} cores, which they take from each "
                "other. Set OMP_NUM_THREADS so that all threads together fit."
            )
        load = max((info.load for info in infos if info.load is not None), default=0.0)
        if load > BUSY * max(cores, threads):
            return (
                f"{host} was busy: a load of {load:.1f} on {cores} cores while {many} with {threads} threads trained. "
                "Record again on a quiet machine before you trust small differences."
            )
    return ""


def not_observed(trace: Trace, *, has_modules: bool, has_memory: bool, has_buckets: bool) -> tuple[str, ...]:
    """In sentences, what this recording does not show although a page or a prediction would use it."""
    said = []
    kinds = {kind for events in trace.events.values() for kind in set(events.kind.tolist())}
    imported = any(info.source for info in trace.manifest.ranks)
    if trace.missing_ranks:
        count = len(trace.missing_ranks)
        which = ", ".join(map(str, trace.missing_ranks[:8])) + (", …" if count > 8 else "")
        said.append(f"{count} of {trace.world_size} ranks: no file of rank{'s' * (count > 1)} {which}.")
    if not has_modules:
        said.append("Modules: their forward and backward were not timed.")
    if Kind.OPERATOR not in kinds:
        said.append("Operators and kernels: --detail operators or --detail kernels records them.")
    if not trace.model.parameters and not trace.stages:
        said.append("The model: parameters and their sizes are not in this trace.")
    elif has_buckets and Kind.GRADIENT_READY not in kinds:
        said.append("When gradients become ready.")
    if not has_memory:
        said.append("Memory: headway record watches it on CPUs under stock DDP, where nothing is compiled.")
    if Kind.INPUT not in kinds:
        said.append("Waiting for input: no torch data loader was seen.")
    if trace.cluster is None:
        why = (
            ""
            if imported
            else " (headway record does so after the last step, unless --no-measuring is given)"
        )
        said.append(f"Links and cores: nothing was measured{why}; predictions fit them from the steps alone.")
    return tuple(said)


def _cores(ranks: Iterable[RankInfo]) -> set[int]:
    """The cores that any of the ranks, all of one host, may use."""
    return {
        core for info in ranks for low, high in info.cores for core in range(low, min(high, low + 65_536) + 1)
    }


def _different(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))


MAX_MODULES = 1000  # in a document


@dataclass(frozen=True, slots=True)
class Details:
    """What readers look up: whose recording it is, and what of it takes how long, or how much memory.

    ``memory`` has a value for each stage of a pipeline, one in all for other jobs, and none where nothing was watched.
    """

    job: JobIdentity
    buckets: tuple[BucketTimes, ...]
    modules: tuple[ModuleTimes, ...]
    memory: tuple[StepMemory, ...]
    not_observed: tuple[str, ...]

    def to_document(self) -> dict[str, Any]:
        """The fields of what ``headway diagnose --json`` prints; of many modules, the slowest."""
        return {
            "job": self.job.to_document(),
            "buckets": [bucket.to_document() for bucket in self.buckets],
            "modules": [module.to_document() for module in self.modules[:MAX_MODULES]],
            "memory": [memory.to_document() for memory in self.memory],
            "not_observed": list(self.not_observed),
        }


def find_details(trace: Trace, times: Mapping[int, RankTime], rows: Communications) -> Details:
    """Look them up in ``trace``, whose communication is ``rows``."""
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
