"""Reads and writes traces on disk: a folder with ``manifest.json``, ``model.json`` and one Parquet file per rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel

from headway import files
from headway.cluster import Cluster
from headway.errors import TraceError
from headway.model import ModelSpec
from headway.trace.events import OPTIONAL_COLUMNS, TEXT_COLUMNS, Event, Events, Kind, is_absent
from headway.trace.format import FORMAT, Manifest, RankInfo, RankRounds, Trace
from headway.trace.rank_columns import Allowance, RankColumns
from headway.version import __version__

if TYPE_CHECKING:
    import pyarrow as pa


def upgraded(manifest: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest of format 1. Rank files need no conversion: the columns they lack are optional."""
    return manifest | {"format": FORMAT}


MANIFEST = "manifest.json"
MODEL = "model.json"
CLUSTER = "cluster.yaml"  # present if the job measured its links and machines
_Description = TypeVar("_Description", bound=BaseModel)
LATEST_NS = 2**61  # some 70 years, so that clocks that count from 1970 are allowed


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.parquet"


def server_file(server: int) -> str:
    """The name of a parameter server's file."""
    return f"server-{server:05d}.parquet"


def write_rank(
    folder: Path,
    info: RankInfo,
    model: ModelSpec,
    events: Events | list[Event],
    stages: Mapping[int, ModelSpec] = MappingProxyType({}),
    rounds: RankRounds | None = None,
) -> Path:
    """Write one rank's self-contained file: its events and its description.

    ``stages`` are the models of its pipeline stages by number, if it has several; ``rounds`` its averaging rounds.
    """
    columns = events if isinstance(events, Events) else Events.from_rows(events)
    return _write_events(folder / rank_file(info.rank), info, model, columns, stages, rounds)


def write_trace(
    folder: Path,
    manifest: Manifest,
    model: ModelSpec,
    events: Mapping[int, Events],
    servers: Mapping[int, Events] | None = None,
    rounds: Mapping[int, RankRounds] = MappingProxyType({}),
) -> None:
    """Write a complete trace into ``folder``, which must exist."""
    for info in manifest.ranks:
        rank_rounds = rounds.get(info.rank)
        _write_events(folder / rank_file(info.rank), info, model, events[info.rank], rounds=rank_rounds)
    for info in manifest.servers:
        _write_events(folder / server_file(info.rank), info, model, (servers or {})[info.rank])
    _write_descriptions(folder, manifest, model)


def _write_events(
    path: Path,
    info: RankInfo,
    model: ModelSpec,
    events: Events,
    stages: Mapping[int, ModelSpec] = MappingProxyType({}),
    rounds: RankRounds | None = None,
) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: getattr(events, name) for name in Event._fields}
    arrays = {
        name: _arrow(name, column)
        for name, column in columns.items()
        if not (name in OPTIONAL_COLUMNS and is_absent(column))
    }
    described = {"headway": __version__, "rank": info.model_dump_json(), "model": model.model_dump_json()}
    if stages:
        described["stages"] = _RankStages(stages=dict(stages)).model_dump_json()
    if rounds is not None:
        described["rounds"] = rounds.model_dump_json(exclude_defaults=True)
    table = pa.table(arrays).replace_schema_metadata(described)
    unfinished = path.with_suffix(".writing")
    pq.write_table(table, unfinished, compression="zstd")
    unfinished.replace(path)
    return path


def _arrow(name: str, values: Any) -> pa.Array:
    import pyarrow as pa

    if name not in TEXT_COLUMNS:
        return pa.array(values)
    return pa.array(values, type=pa.string()).dictionary_encode()


def _write_descriptions(folder: Path, manifest: Manifest, model: ModelSpec) -> None:
    files.write_text(folder / MODEL, model.model_dump_json(indent=1), TraceError)
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the manifest of the trace in ``folder``."""
    files.write_text(folder / MANIFEST, manifest.model_dump_json(indent=1), TraceError)


def assemble(folder: Path, *, missing_ok: bool = False) -> Manifest:
    """Turn a folder of rank files into a trace by writing ``manifest.json`` and ``model.json``; returns the manifest.

    Raises TraceError if a rank's file is damaged or missing. With ``missing_ok``, a note lists missing ranks instead.
    """
    infos: list[RankInfo] = []
    model: ModelSpec | None = None
    steps: set[int] | None = None
    for path in sorted(folder.glob("rank-*.parquet")):
        with RankColumns(path, Allowance()) as file:
            infos.append(_metadata(file, "rank", RankInfo))
            model = model or _metadata(file, "model", ModelSpec)
            columns = file.read(("kind", "step"))
        rank_steps = set(np.unique(columns["step"][columns["kind"] == Kind.STEP]).tolist())
        steps = rank_steps if steps is None else steps & rank_steps
    if model is None or not infos:
        raise TraceError("no rank wrote a file", got=folder, expected="one rank-*.parquet per rank")
    missing = sorted(set(range(infos[0].world_size)) - {info.rank for info in infos})
    names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    if missing and not missing_ok:
        raise TraceError(
            f"rank {names} wrote no file",
            got=f"{len(infos)} rank files",
            expected=f"{infos[0].world_size}, one per rank",
            fix="Find out why that rank ended early, and record again.",
        )
    absent = (
        (f"{len(missing)} of {infos[0].world_size} ranks wrote no file: rank {names}",) if missing else ()
    )
    manifest = Manifest(
        world_size=infos[0].world_size,
        steps=tuple(sorted(steps or ())),
        ranks=tuple(
            info.model_copy(update={"groups": {}}) for info in sorted(infos, key=lambda info: info.rank)
        ),
        groups={name: ranks for info in infos for name, ranks in info.groups.items()},
        notes=(*absent, *dict.fromkeys(note for info in infos for note in info.notes)),
    )
    _write_descriptions(folder, manifest, model)
    return manifest


def load_trace(path: str | Path) -> Trace:
    """Read a trace folder.

    Raises TraceError if the folder is missing, empty, damaged or not a trace, or lacks a file or step listed in its
    manifest.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise TraceError(
            "trace not found", got=folder, expected="a folder that headway record or headway import wrote",
            fix="Import profiles of other tools first: headway import.",
        )  # fmt: skip
    if not (folder / MANIFEST).is_file():
        what = "the folder is empty" if not any(folder.iterdir()) else f"the folder has no {MANIFEST}"
        raise TraceError(
            what, got=folder, expected="a folder that headway record or headway import wrote",
            fix="Import profiles of other tools first: headway import.",
        )  # fmt: skip
    manifest = _manifest(folder / MANIFEST)
    model = files.validate(_json(folder / MODEL), ModelSpec, TraceError, f"{folder / MODEL}")
    _check_files(folder, manifest)
    if not manifest.ranks:
        raise TraceError(
            "the trace holds no rank", got=folder, expected="at least one rank", fix="Record again."
        )
    if not manifest.steps:
        raise TraceError("the trace holds no complete step", got=folder, fix="Record more steps.")
    allowance = Allowance()
    events: dict[int, Events] = {}
    rounds: dict[int, RankRounds] = {}
    for info in manifest.ranks:
        path_of_rank = folder / rank_file(info.rank)
        events[info.rank], rank_rounds = _read_rank(path_of_rank, info.rank, allowance)
        if rank_rounds is not None:
            rounds[info.rank] = rank_rounds
    for info in manifest.ranks:
        _check_steps(folder / rank_file(info.rank), manifest, events[info.rank])
    servers = {
        info.rank: _read_rank(folder / server_file(info.rank), info.rank, allowance)[0]
        for info in manifest.servers
    }
    stages = _stages(folder, events)
    return Trace(
        folder, manifest, model, events, servers, _measured_cluster(folder, manifest), stages, rounds
    )


class _RankStages(BaseModel):
    """The models of a rank's pipeline stages, by number."""

    stages: dict[int, ModelSpec]


def _stages(folder: Path, events: Mapping[int, Events]) -> tuple[ModelSpec, ...]:
    """The model of each pipeline stage, from the file of the first rank that has it.

    Empty unless every stage is on equally many ranks, and on only one if some rank has several stages.
    """
    rank_of: dict[int, int] = {}
    count: Counter[int] = Counter()
    most = 0
    for rank, rank_events in sorted(events.items()):
        stages = rank_events.stages
        if not stages:
            return ()
        most = max(most, len(stages))
        for stage in stages:
            rank_of.setdefault(stage, rank)
        count.update(stages)
    shared = max(count.values(), default=0)
    if sorted(rank_of) != list(range(len(rank_of))) or min(count.values(), default=0) != shared:
        return ()
    if most > 1 < shared:
        return ()
    models: dict[int, ModelSpec] = {}
    for rank in sorted(set(rank_of.values())):
        with RankColumns(folder / rank_file(rank), Allowance()) as file:
            models = {**_models_of(file, events[rank].stages), **models}
    return tuple(models[stage] for stage in sorted(rank_of)) if models.keys() >= rank_of.keys() else ()


def _models_of(file: RankColumns, stages: Sequence[int]) -> Mapping[int, ModelSpec]:
    if len(stages) == 1:
        return {stages[0]: _metadata(file, "model", ModelSpec)}
    if b"stages" not in file.metadata:
        return {}
    return _metadata(file, "stages", _RankStages).stages


def _manifest(path: Path) -> Manifest:
    data = _json(path)
    written = data.get("format") if isinstance(data, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise TraceError(
            "the trace has a newer format", got=f"format {written}", expected=f"at most {FORMAT}",
            fix="Use the version of Headway that wrote it, or a newer one.",
        )  # fmt: skip
    return files.validate(upgraded(data) if written == 1 else data, Manifest, TraceError, f"{path}")


def _measured_cluster(folder: Path, manifest: Manifest) -> Cluster | None:
    if not (folder / CLUSTER).is_file():
        return None
    cluster = Cluster.load(folder / CLUSTER)
    if cluster.world_size != manifest.world_size:
        raise TraceError(
            f"{CLUSTER} belongs to another job", got=f"{cluster.world_size} workers",
            expected=f"{manifest.world_size}, as in the trace", fix="Remove the file, or record again.",
        )  # fmt: skip
    return cluster


def _check_files(folder: Path, manifest: Manifest) -> None:
    wanted = {f"rank {info.rank}": rank_file(info.rank) for info in manifest.ranks}
    wanted |= {f"server {info.rank}": server_file(info.rank) for info in manifest.servers}
    missing = [who for who, name in wanted.items() if not (folder / name).is_file()]
    if missing:
        raise TraceError(
            f"the trace lacks {', '.join(missing[:8])}",
            got=f"{len(wanted) - len(missing)} files",
            expected=f"the {len(wanted)} files listed in {MANIFEST}",
            fix="Copy the missing files into the folder, or record again.",
        )


def _read_rank(path: Path, rank: int, allowance: Allowance) -> tuple[Events, RankRounds | None]:
    """A rank's events, and its averaging rounds if it has any."""
    with RankColumns(path, allowance) as file:
        info = _metadata(file, "rank", RankInfo)
        rounds = _metadata(file, "rounds", RankRounds) if b"rounds" in file.metadata else None
        columns = file.read(Event._fields)
    if info.rank != rank:
        raise TraceError(
            f"{path.name} belongs to another rank", got=f"rank {info.rank}", expected=f"rank {rank}",
            fix="Copy the file again, or record again.",
        )  # fmt: skip
    events = Events(**columns)
    _check_times(path, events)
    return events, rounds


def _check_steps(path: Path, manifest: Manifest, events: Events) -> None:
    missing = sorted(set(manifest.steps) - events.whole_steps)
    if missing:
        raise TraceError(
            f"{path.name} lacks step {', '.join(map(str, missing[:8]))}",
            got=f"{len(manifest.steps) - len(missing)} steps",
            expected=f"the {len(manifest.steps)} steps listed in {MANIFEST}",
            fix="Copy the file again, or record again.",
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(files.read_text(path, TraceError, path.name))
    except TraceError:
        raise
    except (ValueError, RecursionError):  # an integer with thousands of digits raises a plain ValueError
        raise TraceError(
            f"{path.name} is damaged", got=path, expected="valid JSON", fix="Record again."
        ) from None


def _metadata(file: RankColumns, key: str, kind: type[_Description]) -> _Description:
    """The description stored under ``key`` in the file's metadata."""
    name = file.path.name
    try:
        document = json.loads(file.metadata[key.encode()])
    except (KeyError, ValueError, RecursionError):
        raise TraceError(
            f"{name} was not written by Headway", got=file.path, expected="a file that headway record wrote"
        ) from None
    return files.validate(document, kind, TraceError, name)


def _check_times(path: Path, events: Events) -> None:
    if not len(events):
        return
    if (events.duration_ns < 0).any():
        raise TraceError(f"{path.name} is damaged", got="a negative duration", fix="Record again.")
    times_ns = (events.start_ns, events.duration_ns, events.enqueue_ns)
    latest_ns = max(max(int(column.max()), -int(column.min())) for column in times_ns)
    if latest_ns > LATEST_NS:
        raise TraceError(
            f"{path.name} is damaged: times are out of range",
            got=f"{latest_ns} ns",
            expected=f"at most {LATEST_NS}",
        )
