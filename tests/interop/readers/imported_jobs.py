"""Imports of fixtures, checked through to all that a trace is for."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headway.diagnosis import diagnose
from headway.errors import TraceError
from headway.interop.exporters.chakra import write_chakra
from headway.interop.exporters.perfetto import write_perfetto
from headway.interop.readers.importing import import_trace
from headway.report.page import write_html
from headway.trace.events import Kind
from headway.trace.folder import load_trace


@dataclass(frozen=True)
class ImportedJob:
    """Fixtures of one job, by patterns in a folder of fixtures, and what is true of it.

    ``formats`` counts documents by format. ``has_servers`` says that parameter servers keep the parameters.
    """

    patterns: list[str]
    framework: str
    ranks: int
    steps: int
    formats: dict[str, int] = field(default_factory=dict)
    has_servers: bool = False


def copied(fixtures: Path, folder: Path, patterns: list[str]) -> Path:
    """A new folder with copies of the fixtures that match."""
    source = folder / "in"
    source.mkdir()
    for pattern in patterns:
        for path in fixtures.glob(pattern):
            shutil.copy(path, source)
    return source


def check_job(job: ImportedJob, fixtures: Path, folder: Path) -> None:
    """Import a job, and diagnose, draw and export its trace."""
    framework, ranks, steps = job.framework, job.ranks, job.steps
    done = import_trace(copied(fixtures, folder, job.patterns), folder / "out")
    assert (done.formats, done.left_out) == (job.formats, ())
    trace = load_trace(folder / "out")
    manifest = trace.manifest
    assert manifest == done.manifest
    assert (manifest.framework, manifest.world_size, len(manifest.steps)) == (framework, ranks, steps)
    assert not trace.missing_ranks
    assert all(len(note.splitlines()) == 1 for note in manifest.notes)
    for events in (*trace.events.values(), *trace.servers.values()):
        assert (events.duration_ns >= 0).all()
        assert (events.start_ns[1:] >= events.start_ns[:-1]).all()
    for events in trace.events.values():
        assert set(manifest.steps) <= set(events.of_kind(Kind.STEP).step.tolist())
        assert (events.of_kind(Kind.COLLECTIVE).sequence >= 0).all()
    found = diagnose(trace)
    assert found.verdict
    assert found.to_document()["notes"][: len(manifest.notes)] == list(manifest.notes)
    assert all(parts.total_ms >= 0 for parts in found.breakdown.values())
    write_html(trace, found, folder / "page.html")
    assert (folder / "page.html").stat().st_size > 10_000
    assert write_perfetto(trace, folder / "trace.pftrace") > 0
    if job.has_servers:
        with pytest.raises(TraceError, match="Chakra cannot represent parameter servers"):
            write_chakra(trace, folder / "chakra")
    else:
        assert len(write_chakra(trace, folder / "chakra")) == ranks
        again = import_trace(folder / "chakra", folder / "again").manifest
        assert (again.world_size, len(again.steps)) == (ranks, steps)
