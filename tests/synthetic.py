"""Synthetic traces with known truth: a data-parallel job whose every moment is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.synthetic_job import MS, Connections, Extra, SyntheticJob
from tests.synthetic_run import events_of

from headway.model import ModelSpec, ParameterSpec
from headway.trace.events import Event, Events, Kind
from headway.trace.folder import assemble, write_rank
from headway.trace.format import ClockFit, Manifest, RankInfo, Trace

__all__ = [
    "MS", "Connections", "Extra", "SyntheticJob", "events_of", "synthetic_trace", "trace_of", "with_ranks",
    "without_ranks", "write_trace",
]  # fmt: skip


def synthetic_trace(job: SyntheticJob | None = None) -> Trace:
    """The job's trace, in memory."""
    job = job or SyntheticJob()
    rows = events_of(job)
    return trace_of(rows, model=_model(job), infos=_infos(job))


def trace_of(
    rows: dict[int, list[Event]], *, model: ModelSpec | None = None, infos: tuple[RankInfo, ...] | None = None
) -> Trace:
    """A trace in memory from any events."""
    steps: set[int] = set.intersection(
        *({event.step for event in events if event.kind == Kind.STEP} for events in rows.values())
    )
    ranks = infos or tuple(_info(rank, len(rows), f"host{rank}") for rank in rows)
    manifest = Manifest(world_size=len(rows), steps=tuple(sorted(steps)), ranks=ranks)
    columns = {rank: Events.from_rows(events) for rank, events in rows.items()}
    return Trace(Path("synthetic"), manifest, model or ModelSpec(parameters=()), columns)


def with_ranks(trace: Trace, changes: Mapping[int, Mapping[str, Any]]) -> Trace:
    """The trace with other descriptions of some ranks, such as another host or clock."""
    ranks = tuple(info.model_copy(update=dict(changes.get(info.rank, {}))) for info in trace.manifest.ranks)
    return replace(trace, manifest=trace.manifest.model_copy(update={"ranks": ranks}))


def without_ranks(trace: Trace, *ranks: int) -> Trace:
    """The same trace without the recordings of some ranks."""
    infos = tuple(info for info in trace.manifest.ranks if info.rank not in ranks)
    events = {rank: own for rank, own in trace.events.items() if rank not in ranks}
    return replace(trace, manifest=trace.manifest.model_copy(update={"ranks": infos}), events=events)


def write_trace(job: SyntheticJob, folder: Path) -> Path:
    """Write the job's trace as a recording would; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = events_of(job)
    for info in _infos(job):
        write_rank(folder, info, _model(job), rows[info.rank])
    assemble(folder)
    return folder


def _model(job: SyntheticJob) -> ModelSpec:
    sizes = job.bucket_bytes[::-1] if job.one_module_a_bucket else [4000] * len(job.modules)
    parameters = tuple(
        ParameterSpec(name=f"{module}.weight", shape=(size // 4,), dtype="float32", module=module)
        for module, size in zip(job.modules, sizes, strict=True)
    )
    ready = tuple(parameter.name for parameter in reversed(parameters))
    return ModelSpec(parameters=parameters, forward_order=job.modules, ready_order=ready)


def _infos(job: SyntheticJob) -> tuple[RankInfo, ...]:
    return tuple(
        _info(rank, job.world_size, f"host{rank // job.ranks_a_host}") for rank in range(job.world_size)
    )


def _info(rank: int, world_size: int, host: str) -> RankInfo:
    clock = ClockFit(offset_ns=1500.0 * rank, drift_ppm=0.5 * rank, uncertainty_ns=2000.0 * (rank > 0))
    return RankInfo(
        rank=rank,
        host=host,
        pid=100 + rank,
        world_size=world_size,
        backend="gloo",
        version="2.13.0",
        clock=clock,
    )
