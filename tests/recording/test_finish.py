"""Clocks of a recording that nobody could compare: told from what ranks did together, or from another of their host."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.synthetic import MS, SyntheticJob, events_of

from headway.clocks.comparing import UNKNOWN_NS
from headway.errors import UserError
from headway.model import ModelSpec
from headway.recording import finish
from headway.recording.finish import finish_recording, redacted_command
from headway.recording.place import ATTEMPT, DESCRIPTION, Recording
from headway.trace.events import Events
from headway.trace.folder import load_trace, write_rank
from headway.trace.format import ClockFit, RankInfo, Trace

pytestmark = pytest.mark.timeout(60)

UNKNOWN = ClockFit(uncertainty_ns=UNKNOWN_NS)
JOB = SyntheticJob(world_size=4, steps=8, jitter=0.3, blocking_loss=True)


def recorded(
    folder: Path, hosts: list[str], ahead_ns: list[int], clocks: list[ClockFit], job: SyntheticJob = JOB
) -> dict[int, Events]:
    """Rank files of ``job``, whose ranks' clocks are so far ahead of rank 0's; returns the events as they were."""
    folder.mkdir()
    rows = events_of(job)
    for rank, events in rows.items():
        info = RankInfo(
            rank=rank, host=hosts[rank], world_size=len(rows), backend="gloo", version="2", clock=clocks[rank]
        )
        shown = [
            event._replace(
                start_ns=event.start_ns + ahead_ns[rank],
                enqueue_ns=event.enqueue_ns + ahead_ns[rank] if event.enqueue_ns >= 0 else -1,
            )
            for event in events
        ]
        write_rank(folder, info, ModelSpec(parameters=()), shown)
    return {rank: Events.from_rows(events) for rank, events in rows.items()}


def finished(staging: Path) -> Trace:
    out = staging.parent / "trace"
    finish_recording(staging, out, None, wait_s=0)
    assert not staging.exists()
    assert {path.name for path in out.iterdir()} == {
        "manifest.json", "model.json", *(f"rank-{rank:05d}.parquet" for rank in range(4))
    }  # fmt: skip
    return load_trace(out)


def off_ns(trace: Trace, truth: dict[int, Events], rank: int) -> int:
    """By how much a rank's events are off at most."""
    own, true = trace.events[rank], truth[rank]
    assert own.kind.tolist() == true.kind.tolist()
    return int(abs(own.start_ns - true.start_ns).max())


@pytest.mark.parametrize("ahead_ms", [40, -40, 3_600_000])
def test_a_clock_that_is_ahead_is_set_right_by_causality(ahead_ms: int, tmp_path: Path) -> None:
    ahead_ns = ahead_ms * MS
    hosts = ["a", "b", "c", "d"]
    truth = recorded(
        tmp_path / "staging", hosts, [0, 0, ahead_ns, -ahead_ns // 2], [ClockFit(), *[UNKNOWN] * 3]
    )
    trace = finished(tmp_path / "staging")
    first, *others = (info.clock for info in trace.manifest.ranks)
    assert first == ClockFit()
    for rank, clock in enumerate(others, 1):
        assert clock.by == "causality"
        assert clock.uncertainty_ns < 20 * MS
        assert off_ns(trace, truth, rank) <= clock.uncertainty_ns
    assert abs(others[1].offset_ns + ahead_ns) <= 20 * MS


def test_ranks_of_one_host_share_what_is_known_of_its_clock(tmp_path: Path) -> None:
    known = ClockFit(offset_ns=-7.0 * MS, drift_ppm=0.0, reference_ns=0, uncertainty_ns=1000.0)
    # Rank 2's file is on rank 0's clock already, rank 3's on its own.
    truth = recorded(
        tmp_path / "staging", ["a", "a", "b", "b"], [0, 0, 0, 7 * MS], [ClockFit(), UNKNOWN, known, UNKNOWN]
    )
    trace = finished(tmp_path / "staging")
    clocks = [info.clock for info in trace.manifest.ranks]
    assert clocks == [ClockFit(), ClockFit(), known, known]
    assert [off_ns(trace, truth, rank) for rank in range(4)] == [0, 0, 0, 0]


def test_a_host_of_which_nothing_is_known_is_told_beside_one_that_is(tmp_path: Path) -> None:
    known = ClockFit(offset_ns=5.0 * MS, uncertainty_ns=2000.0)
    truth = recorded(
        tmp_path / "staging",
        ["a", "b", "c", "c"],
        [0, 0, 30 * MS, 30 * MS],
        [ClockFit(), known, UNKNOWN, UNKNOWN],
    )
    trace = finished(tmp_path / "staging")
    clocks = [info.clock for info in trace.manifest.ranks]
    assert clocks[:2] == [ClockFit(), known]
    assert clocks[2] == clocks[3]
    assert clocks[2].by == "causality"
    assert [off_ns(trace, truth, rank) for rank in range(2)] == [0, 0]
    assert max(off_ns(trace, truth, rank) for rank in (2, 3)) <= clocks[2].uncertainty_ns < 20 * MS


def test_on_one_host_there_is_one_clock(tmp_path: Path) -> None:
    truth = recorded(tmp_path / "staging", ["a"] * 4, [0] * 4, [ClockFit(), *[UNKNOWN] * 3])
    trace = finished(tmp_path / "staging")
    assert {info.clock for info in trace.manifest.ranks} == {ClockFit()}
    assert [off_ns(trace, truth, rank) for rank in range(4)] == [0] * 4


def test_clocks_that_were_compared_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish, "fit_clocks", None)
    clocks = [ClockFit(), *(ClockFit(offset_ns=float(n), uncertainty_ns=100.0) for n in range(3))]
    recorded(tmp_path / "staging", ["a", "b", "c", "d"], [0, 40 * MS, 0, 0], clocks)
    before = {path.name: path.stat().st_ino for path in (tmp_path / "staging").glob("*.parquet")}
    trace = finished(tmp_path / "staging")
    assert [info.clock for info in trace.manifest.ranks] == clocks
    assert {path.name: path.stat().st_ino for path in (tmp_path / "trace").glob("*.parquet")} == before


def test_ranks_that_never_met_keep_their_clocks_unknown(tmp_path: Path) -> None:
    job = SyntheticJob(world_size=4, steps=3, bucket_bytes=())
    recorded(tmp_path / "staging", ["a", "b", "c", "d"], [0] * 4, [ClockFit(), *[UNKNOWN] * 3], job)
    clocks = [info.clock for info in finished(tmp_path / "staging").manifest.ranks]
    assert all(clock.uncertainty_ns >= UNKNOWN_NS for clock in clocks[1:])


def test_without_the_solver_the_recording_is_kept_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_arguments: object, **_more: object) -> None:
        raise UserError("clocks cannot be aligned", got="no scipy")

    monkeypatch.setattr(finish, "fit_clocks", missing)
    recorded(tmp_path / "staging", ["a", "b", "c", "c"], [0] * 4, [ClockFit(), *[UNKNOWN] * 3])
    trace = finished(tmp_path / "staging")
    assert [info.clock for info in trace.manifest.ranks][1:] == [UNKNOWN] * 3
    assert "no scipy" in trace.manifest.notes[-1]


def attempt(staging: Path, name: str, started_s: float, ranks: int) -> None:
    """An attempt of a job of 4 ranks, of which the first few wrote their files."""
    folder = staging / f"{ATTEMPT}{name}"
    recorded(folder, ["a"] * 4, [0] * 4, [ClockFit()] * 4)
    for rank in range(ranks, 4):
        (folder / f"rank-{rank:05d}.parquet").unlink()
    said = Recording(token=name, run="job 7", attempt=int(started_s), world_size=4, host="a", folder=folder,
                     started_s=started_s)  # fmt: skip
    (folder / DESCRIPTION).write_text(said.model_dump_json())


@pytest.mark.parametrize(
    ("ranks", "chosen", "present"),
    [((2, 4), 1, 4), ((4, 1), 0, 4), ((1, 3), 1, 3)],
    ids=["new", "old", "parts"],
)
def test_attempts_of_a_job_are_told_apart(
    ranks: tuple[int, int], chosen: int, present: int, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    for number, count in enumerate(ranks):
        attempt(staging, f"t{number}", float(number), count)
    command = ("torchrun", "--nproc-per-node", "4", "train.py")
    finish_recording(staging, tmp_path / "trace", None, wait_s=0, incomplete=True, command=command)
    trace = load_trace(tmp_path / "trace")
    assert (trace.manifest.run, trace.manifest.attempt) == ("job 7", chosen)
    assert trace.manifest.command == command
    assert trace.manifest.recorded_at == (datetime.fromtimestamp(chosen, UTC) if chosen else None)
    assert sorted(trace.events) == list(range(present))
    assert trace.manifest.notes == (("1 of 4 ranks wrote no file: rank 3",) if present == 3 else ())
    assert {path.suffix for path in trace.path.iterdir()} == {".json", ".parquet"}
    assert not (trace.path / DESCRIPTION).exists()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("torchrun train.py --tokenizer gpt2 --max-tokens 9", "torchrun train.py --tokenizer gpt2 --max-tokens 9"),
        ("env HF_TOKEN=abc torchrun --api-key abc -v", "env HF_TOKEN=*** torchrun --api-key *** -v"),
        ("python t.py --password=abc --token --verbose", "python t.py --password=*** --token --verbose"),
        (f"python t.py {'x' * 5000}", ""),
        ("python \udcff.py", ""),
    ],
)  # fmt: skip
def test_a_trace_keeps_its_command_without_secrets_and_without_what_no_file_can_hold(
    command: str, told: str
) -> None:
    assert redacted_command(command.split()) == tuple(told.split())
