"""Recordings of others, unchanged, which lie next to the repository and are no part of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from headway.diagnosis import Diagnosis, diagnose
from headway.errors import TraceError
from headway.interop.readers.importing import import_trace
from headway.trace.events import Events, Kind, Stream
from headway.trace.folder import load_trace
from headway.trace.format import Trace

TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"
pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the third-party traces are not there: {TRACES}")


def imported(folder: Path, *names: str) -> tuple[Trace, Diagnosis]:
    """Import those files as one job, and diagnose it."""
    (folder / "in").mkdir()
    for name in names:
        if not (TRACES / name).is_file():
            pytest.skip(f"{TRACES / name} is not there")
        shutil.copyfile(TRACES / name, folder / "in" / name)
    import_trace(folder / "in", folder / "out")
    trace = load_trace(folder / "out")
    return trace, diagnose(trace)


def step_ms(events: Events) -> list[float]:
    steps = events.of_kind(Kind.STEP)
    lengths: list[float] = (steps.duration_ns / 1e6).tolist()
    return lengths


def of_step(events: Events, step: int) -> list[tuple[str, int, int]]:
    """Name, bytes and bucket of each collective."""
    own = events.of_step(step).of_kind(Kind.COLLECTIVE)
    return [(one.name, one.size_bytes, one.bucket) for one in own]


def check_streams(events: Events) -> None:
    """Compute and communication have events; steps follow each other, and hold what is in them."""
    steps = events.of_kind(Kind.STEP)
    assert (steps.start_ns[1:] >= steps.end_ns[:-1]).all()
    assert {Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.WAIT, Kind.IDLE} <= set(events.kind.tolist())
    assert set(events.of_kind(Kind.COLLECTIVE).stream.tolist()) == {Stream.COMMUNICATION}
    assert set(events.step.tolist()) == set(steps.step.tolist())
    assert (events.duration_ns >= 0).all()


def test_two_a100(tmp_path: Path) -> None:
    """ResNet-50: five buckets, two broadcasts of buffers, and a host that launches late."""
    trace, found = imported(tmp_path, "kineto_nccl_a100_rank0of2.json.gz")
    manifest, events = trace.manifest, trace.events[0]
    assert (manifest.steps, manifest.world_size, manifest.ranks[0].backend) == ((4, 5, 6), 2, "nccl")
    assert trace.missing_ranks == (1,)
    assert manifest.notes == ("1 of 2 ranks are not in this trace.",)
    assert manifest.groups == {"0": (0, 1)}
    assert all(215 < length < 225 for length in step_ms(events))
    buckets = [8_196_000, 31_502_336, 26_255_360, 26_550_272, 9_724_160]
    assert sum(buckets) == 25_557_032 * 4  # ResNet-50's parameters
    wanted = [
        ("broadcast", 212_480, -1),
        ("broadcast", 424, -1),
        *(("all_reduce", size, at) for at, size in enumerate(buckets)),
    ]
    for step in manifest.steps:
        assert of_step(events, step) == wanted
    assert set(events.of_kind(Kind.COLLECTIVE).group.tolist()) == {"0"}
    check_streams(events)
    idle = events.of_kind(Kind.IDLE)
    assert set(idle.name.tolist()) == {"launching"}
    assert 150 < idle.duration_ns.sum() / 3e6 < 180
    assert found.verdict.startswith("The device is idle for 16")
    assert "because the host does not launch work fast enough" in found.verdict


def test_eight_mi300(tmp_path: Path) -> None:
    """ResNet-18. RCCL's kernels say nothing of themselves: calls around their launches do."""
    trace, found = imported(tmp_path, "kineto_rccl_mi300_rank0of8.json.gz")
    manifest, events = trace.manifest, trace.events[0]
    assert (manifest.steps, manifest.world_size) == ((15, 16, 17), 8)
    assert all(18 < length < 20 for length in step_ms(events))
    wanted = [
        ("broadcast", 19_200, -1),
        ("broadcast", 160, -1),
        ("all_reduce", 5_746_640, 0),
        ("all_reduce", 17_632_384, 1),
    ]
    assert 5_746_640 + 17_632_384 == 11_689_512 * 2  # ResNet-18's parameters, as bfloat16
    for step in manifest.steps:
        assert of_step(events, step) == wanted
    assert manifest.groups == {"0": tuple(range(8))}
    assert set(events.of_kind(Kind.COLLECTIVE).group.tolist()) == {"0"}
    check_streams(events)
    assert found.verdict.startswith("Communication is the bottleneck: 6")
    assert "because one 17.6 MB bucket carries 75 % of them" in found.verdict


def test_two_of_128_ranks(tmp_path: Path) -> None:
    """A recommender of 2023: neither groups nor numbers, sizes from annotations, a part of all events."""
    trace, found = imported(tmp_path, *(f"kineto_nccl_128ranks_rank{rank}.json.gz" for rank in (0, 1)))
    manifest = trace.manifest
    assert (manifest.steps, manifest.world_size, sorted(trace.events)) == ((551, 552), 128, [0, 1])
    assert len(trace.missing_ranks) == 126
    for events in trace.events.values():
        assert all(590 < length < 640 for length in step_ms(events))
        check_streams(events)
        assert {"all_to_all", "all_reduce", "all_gather"} == set(
            events.of_kind(Kind.COLLECTIVE).name.tolist()
        )
    clock = manifest.ranks[1].clock
    assert (clock.by, abs(clock.offset_ns) < 1e6) == ("causality", True)
    first, second = (trace.events[rank].of_kind(Kind.COLLECTIVE) for rank in (0, 1))
    _, here, there = np.intersect1d(first.sequence, second.sequence, return_indices=True)
    assert len(here) == 5
    assert (np.abs(first.end_ns[here] - second.end_ns[there]) < 1e6).all()
    assert "2 of 10 collectives have no recorded size." in manifest.notes  # all_gather's share, not the whole
    assert "5 collectives have no counterpart on rank 0." in manifest.notes
    assert found.verdict.startswith("The device is idle for 33")


def test_one_of_300_ranks_on_gloo(tmp_path: Path) -> None:
    """One step is marked, after which eight of ten all-reduces begin; what was computed is not in the document."""
    trace, found = imported(tmp_path, "kineto_gloo_cpu_rank34of300.json.gz")
    manifest, events = trace.manifest, trace.events[34]
    assert (manifest.steps, manifest.world_size, len(trace.missing_ranks)) == ((551,), 300, 299)
    assert manifest.ranks[0].backend == "gloo"
    assert len(manifest.groups["0"]) == 300
    assert step_ms(events) == [pytest.approx(210.1, abs=0.1)]
    assert [row[:2] for row in of_step(events, 551)] == [
        ("all_reduce", 1_285_084),
        ("all_reduce", 8_329_644),
    ] * 5
    assert found.verdict.startswith(
        "Communication is the bottleneck: 85 % of each 210 ms step waits for all_reduce"
    )
    assert "computation was not recorded" in found.verdict


def test_an_execution_trace_alone_has_no_times(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no file contains times\. An execution trace has no times"):
        import_trace(TRACES / "pytorch_et_resnet_rank_of2.json.gz", tmp_path / "out")


def test_several_jobs_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the files are recordings of several jobs"):
        import_trace(TRACES, tmp_path / "out")
    manifest = import_trace(TRACES, tmp_path / "out", lenient=True).manifest
    assert (manifest.world_size, [info.rank for info in manifest.ranks]) == (128, [0, 1])
    assert any("The files were recordings of several jobs" in note for note in manifest.notes)
