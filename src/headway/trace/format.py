"""The trace on disk: a folder of ``manifest.json``, ``model.json`` and one Parquet file a rank."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from headway import files
from headway.errors import TraceError
from headway.model import ModelSpec
from headway.trace.events import TEXT_COLUMNS, Event, Events, Kind
from headway.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT: Literal[1] = 1
MANIFEST = "manifest.json"
MODEL = "model.json"
MAX_EVENTS_A_RANK = 50_000_000
MAX_WORLD_SIZE = 100_000


class ClockFit(BaseModel):
    """How a rank's clock was brought onto rank 0's: ``t0 = t + offset + drift · (t - reference)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offset_ns: float = 0.0
    drift_ppm: float = 0.0
    reference_ns: int = 0
    uncertainty_ns: float = 0.0


class RankInfo(BaseModel):
    """Where a rank ran, how its clock was aligned and which strategy was in force."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int = Field(ge=0)
    host: str
    pid: int
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)
    backend: str
    torch: str
    clock: ClockFit = ClockFit()
    strategy: dict[str, dict[str, Any]] = {}
    buckets: tuple[tuple[str, ...], ...] = ()
    dropped_events: int = 0


class Manifest(BaseModel):
    """What a trace holds. ``steps`` are the recorded steps' numbers in the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    headway: str = __version__
    framework: str = "pytorch"
    world_size: int = Field(ge=1, le=MAX_WORLD_SIZE)
    steps: tuple[int, ...]
    ranks: tuple[RankInfo, ...]


@dataclass(frozen=True)
class Trace:
    """One recording: who took part, the model, and every rank's events on rank 0's clock."""

    path: Path
    manifest: Manifest
    model: ModelSpec
    events: dict[int, Events]

    @cached_property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        return {info.rank: info.host for info in self.manifest.ranks}

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self.manifest.world_size

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the recorded steps."""
        return self.manifest.steps


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.parquet"


def write_rank(folder: Path, info: RankInfo, model: ModelSpec, rows: list[Event]) -> Path:
    """Write one rank's file, with its description inside, so that each file stands by itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    events = Events.from_rows(rows)
    columns = {name: getattr(events, name) for name in Event._fields}
    arrays = {
        name: pa.array(values, type=pa.string()).dictionary_encode()
        if name in TEXT_COLUMNS
        else pa.array(values)
        for name, values in columns.items()
    }
    table = pa.table(arrays).replace_schema_metadata(
        {"headway": __version__, "rank": info.model_dump_json(), "model": model.model_dump_json()}
    )
    path = folder / rank_file(info.rank)
    beside = path.with_suffix(".writing")
    pq.write_table(table, beside, compression="zstd")
    beside.replace(path)
    return path


def assemble(folder: Path) -> None:
    """Turn a folder of rank files into a trace: write ``manifest.json`` and ``model.json`` from them.

    Raises TraceError where a rank's file is missing or damaged: nobody could load the trace.
    """
    infos: list[RankInfo] = []
    model: ModelSpec | None = None
    steps: set[int] | None = None
    for path in sorted(folder.glob("rank-*.parquet")):
        table = _read_parquet(path)
        info, rank_model = _described(path, table)
        infos.append(info)
        model = model or rank_model
        own = {row.step for row in _to_events(path, table).of_kind("step")}
        steps = own if steps is None else steps & own
    if model is None or not infos:
        raise TraceError("no rank wrote a file", got=folder, expected="one rank-*.parquet a rank")
    missing = sorted(set(range(infos[0].world_size)) - {info.rank for info in infos})
    if missing:
        raise TraceError(
            f"rank {', '.join(map(str, missing[:8]))} wrote no file",
            got=f"{len(infos)} rank files",
            expected=f"{infos[0].world_size}, one a rank",
            fix="See why it ended early, and record again.",
        )
    manifest = Manifest(
        world_size=infos[0].world_size,
        steps=tuple(sorted(steps or ())),
        ranks=tuple(sorted(infos, key=lambda info: info.rank)),
    )
    files.write_text(folder / MODEL, model.model_dump_json(indent=1), TraceError)
    files.write_text(folder / MANIFEST, manifest.model_dump_json(indent=1), TraceError)


def load_trace(path: str | Path) -> Trace:
    """Read a trace folder.

    Raises TraceError where the folder is missing, empty, foreign, truncated, or lacks a rank or a rank's step.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TraceError("trace not found", got=folder, expected="a folder that headway record wrote")
    if not (folder / MANIFEST).is_file():
        what = "the folder is empty" if not any(folder.iterdir()) else f"the folder has no {MANIFEST}"
        raise TraceError(what, got=folder, expected="a folder that headway record wrote")
    manifest = files.validate(_json(folder / MANIFEST), Manifest, TraceError, f"{folder / MANIFEST}")
    model = files.validate(_json(folder / MODEL), ModelSpec, TraceError, f"{folder / MODEL}")
    present = {info.rank for info in manifest.ranks if (folder / rank_file(info.rank)).is_file()}
    missing = sorted(set(range(manifest.world_size)) - present)
    if missing:
        raise TraceError(
            f"the trace lacks rank {', '.join(map(str, missing[:8]))}",
            got=f"{len(present)} rank files",
            expected=f"{manifest.world_size}, one a rank",
            fix="Copy the missing files into the folder, or record again.",
        )
    if not manifest.steps:
        raise TraceError("the trace holds no whole step", got=folder, fix="Record more steps.")
    events = {}
    for info in manifest.ranks:
        file = folder / rank_file(info.rank)
        events[info.rank] = _to_events(file, _read_parquet(file))
        _check_steps(file, manifest, events[info.rank])
    return Trace(folder, manifest, model, events)


def _check_steps(path: Path, manifest: Manifest, events: Events) -> None:
    missing = sorted(set(manifest.steps) - set(events.of_kind(Kind.STEP).step.tolist()))
    if missing:
        raise TraceError(
            f"{path.name} lacks step {', '.join(map(str, missing[:8]))}",
            got=f"{len(manifest.steps) - len(missing)} steps",
            expected=f"the {len(manifest.steps)} of {MANIFEST}",
            fix="Copy the file again, or record again.",
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(files.read_text(path, TraceError, path.name))
    except TraceError:
        raise
    except (ValueError, RecursionError):  # a number of thousands of digits is a plain ValueError
        raise TraceError(
            f"{path.name} is damaged", got=path, expected="valid JSON", fix="Record again."
        ) from None


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_metadata(path).num_rows
        if rows > MAX_EVENTS_A_RANK:
            raise TraceError(
                f"{path} is too large", got=f"{rows} events", expected=f"at most {MAX_EVENTS_A_RANK}"
            )
        return pq.read_table(path)
    except (pa.ArrowException, OSError, ValueError) as failure:
        if isinstance(failure, TraceError):
            raise
        raise TraceError(
            f"{path.name} is damaged or truncated",
            got=path,
            expected="a Parquet file",
            fix="Copy it or record again.",
        ) from None


def _described(path: Path, table: pa.Table) -> tuple[RankInfo, ModelSpec]:
    metadata = table.schema.metadata or {}
    try:
        info = json.loads(metadata[b"rank"])
        model = json.loads(metadata[b"model"])
    except (KeyError, ValueError, RecursionError):
        raise TraceError(
            f"{path.name} is foreign", got=path, expected="a file headway record wrote"
        ) from None
    what = f"{path.name}"
    return files.validate(info, RankInfo, TraceError, what), files.validate(
        model, ModelSpec, TraceError, what
    )


def _to_events(path: Path, table: pa.Table) -> Events:
    missing = [name for name in Event._fields if name not in table.column_names]
    if missing:
        raise TraceError(
            f"{path.name} is foreign", got=f"no column {missing[0]}", expected="headway's columns"
        )
    columns: dict[str, Any] = {}
    for name in Event._fields:
        values = table.column(name).to_numpy()
        try:
            columns[name] = values.astype(object if name in TEXT_COLUMNS else np.int64)
        except (TypeError, ValueError):
            raise TraceError(f"{path.name} is damaged", got=f"column {name} of {values.dtype}") from None
    events = Events(**columns)
    if len(events) and (events.duration_ns < 0).any():
        raise TraceError(f"{path.name} is damaged", got="a negative duration", fix="Record again.")
    return events
