"""Several documents, one after the other or side by side in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.interop.readers.kineto_documents import document, job_events

from headway.errors import TraceError
from headway.interop.readers import importing
from headway.interop.readers.importing import import_trace
from headway.trace.folder import load_trace


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(3):
        (folder / f"rank{rank}.json").write_bytes(document(job_events(), rank=rank, world=3))
    return folder


@pytest.mark.processes
def test_side_by_side_is_the_same_as_one_after_the_other(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    import_trace(source, tmp_path / "one")
    monkeypatch.setattr(importing, "WORTH_BYTES", 0)
    import_trace(source, tmp_path / "many", workers=2, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    one, many = load_trace(tmp_path / "one"), load_trace(tmp_path / "many")
    assert one.manifest == many.manifest
    for rank, events in one.events.items():
        assert list(events) == list(many.events[rank])
    (source / "rank1.json").write_bytes(b'{"schemaVersion": 1, "traceEvents": [')
    with pytest.raises(TraceError, match=r"rank1\.json is damaged"):
        import_trace(source, tmp_path / "strict", workers=2)
    done = import_trace(source, tmp_path / "lenient", workers=2, lenient=True)
    assert [info.rank for info in done.manifest.ranks] == [0, 2]


def dies(*_arguments: object) -> None:
    """What a process does that the kernel ends for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_processes_that_die_take_only_what_they_had(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(8):
        (source / f"rank{rank}.json").write_bytes(document(job_events(), rank=rank, world=8))
    monkeypatch.setattr(importing, "WORTH_BYTES", 0)
    monkeypatch.setattr(importing, "_read_apart", dies)
    with pytest.raises(TraceError, match=r"rank\d\.json could not be read; got its reader process died"):
        import_trace(source, tmp_path / "strict", workers=2)
    done = import_trace(source, tmp_path / "lenient", workers=2, lenient=True)
    kept = [info.rank for info in done.manifest.ranks]
    assert kept == list(range(len(kept)))
    assert 1 <= len(kept) <= 6
    assert sum("its reader process died" in note for note in done.manifest.notes) == 8 - len(kept)


def test_memory_that_does_not_suffice(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_arguments: object) -> Callable[..., object]:
        return np.ones(2**50)  # type: ignore[return-value]

    monkeypatch.setattr("headway.interop.readers.kineto.reader.read", allocate)
    with pytest.raises(TraceError, match=r"rank0\.json does not fit into memory; got \d+ bytes"):
        import_trace(source, tmp_path / "out")
