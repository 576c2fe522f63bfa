"""What a diagnosis has besides causes: the job's identity, its buckets, modules and memory, and what was not seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.diagnosis.buckets import BucketTimes, bucket_times
from headway.diagnosis.communication import Communications
from headway.diagnosis.identity import JobIdentity, job_identity, not_observed
from headway.diagnosis.memory import StepMemory, step_memory
from headway.diagnosis.modules import ModuleTimes, module_times
from headway.diagnosis.timeline import RankTime
from headway.trace.format import Trace

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
