"""Traces that lack ranks or have servers, as imported ones may."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.synthetic import SyntheticJob, synthetic_trace, without_ranks

from headway.errors import TraceError
from headway.trace.events import Events
from headway.trace.folder import load_trace, server_file, write_trace
from headway.trace.format import RankInfo, Trace


@pytest.fixture
def whole() -> Trace:
    return synthetic_trace(SyntheticJob(world_size=4, steps=2))


def written(trace: Trace, folder: Path) -> Path:
    folder.mkdir()
    write_trace(folder, trace.manifest, trace.model, trace.events, trace.servers)
    return folder


def test_ranks_that_the_manifest_does_not_name_may_be_missing(whole: Trace, tmp_path: Path) -> None:
    assert whole.missing_ranks == ()
    trace = load_trace(written(without_ranks(whole, 0, 2), tmp_path / "trace"))
    assert (list(trace.events), trace.world_size, trace.missing_ranks) == ([1, 3], 4, (0, 2))
    assert set(trace.hosts) == {1, 3}
    assert list(trace.events[3]) == list(whole.events[3])


def test_files_that_the_manifest_names_may_not(whole: Trace, tmp_path: Path) -> None:
    server = RankInfo(rank=0, host="h", world_size=4, backend="", version="1.9")
    manifest = whole.manifest.model_copy(update={"servers": (server,)})
    trace = replace(whole, manifest=manifest, servers={0: Events.from_rows([])})
    folder = written(trace, tmp_path / "trace")
    loaded = load_trace(folder)
    assert (list(loaded.servers), len(loaded.servers[0])) == ([0], 0)
    (folder / server_file(0)).unlink()
    with pytest.raises(TraceError, match=r"the trace lacks server 0; got 4 files; expected the 5 files"):
        load_trace(folder)


def test_groups_tell_who_takes_part(whole: Trace) -> None:
    manifest = whole.manifest.model_copy(update={"groups": {"tp": (0, 2), "empty": ()}})
    trace = replace(whole, manifest=manifest)
    found = [list(trace.members(name)) for name in ("tp", "empty", "unknown", "")]
    assert found == [[0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_the_framework_was_called_torch_once(whole: Trace, tmp_path: Path) -> None:
    folder = written(whole, tmp_path / "trace")
    described = json.loads((folder / "manifest.json").read_text())
    for info in described["ranks"]:
        info["torch"] = info.pop("version")
        info.pop("source")
    for key in ("groups", "servers", "notes", "framework"):
        described.pop(key)
    (folder / "manifest.json").write_text(json.dumps(described))
    loaded = load_trace(folder)
    assert [info.version for info in loaded.manifest.ranks] == [info.version for info in whole.manifest.ranks]
    assert (loaded.manifest.framework, loaded.manifest.groups, loaded.servers) == ("pytorch", {}, {})
