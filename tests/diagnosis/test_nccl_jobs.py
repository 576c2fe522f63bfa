"""What is said of imported profiles of NCCL jobs, against jobs of which everything is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.diagnosis.nccl_jobs import Job, Played, documents, play, random_job
from tests.exhaustive import examples

from headway.diagnosis.diagnosis import Diagnosis, diagnose
from headway.interop.readers.importing import import_trace
from headway.trace.folder import load_trace

KINDS = ("ddp", "tp", "moe", "fsdp", "hsdp", "pp")
JOBS = 40  # of each kind; 10 unless all are asked for
EVERYBODY_TELLS = 0.08  # of a step: a straggler that costs more has to be named
NOBODY_TELLS = 0.05  # one that costs less need not be


@dataclass(frozen=True)
class Told:
    """A job, what happened, and what is said of it."""

    job: Job
    played: Played
    said: Diagnosis
    uncertain_us: tuple[tuple[float, float], ...]  # each rank's clock: how wrong it is, how wrong it may be


def told(job: Job, folder: Path) -> Told:
    """Import and diagnose a job's documents."""
    played = play(job)
    source, trace = folder / "documents", folder / "trace"
    source.mkdir(parents=True)
    for name, data in documents(job, played).items():
        (source / name).write_bytes(data)
    import_trace(source, trace)
    loaded = load_trace(trace)
    first = job.hosts[min(loaded.events)]
    clocks = tuple(
        (
            abs(
                job.offsets_us.get(first, 0.0)
                - job.offsets_us.get(job.hosts[info.rank], 0.0)
                - info.clock.offset_ns / 1e3
            ),
            info.clock.uncertainty_ns / 1e3,
        )
        for info in loaded.manifest.ranks
    )
    return Told(job, played, diagnose(loaded), clocks)


def accused(said: Diagnosis) -> set[int]:
    """The ranks that are called stragglers."""
    return {
        rank for one in said.findings if one.cause == "straggler" and one.stands_out for rank in one.ranks
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_is_true(kind: str, tmp_path: Path) -> None:
    right = waits_right = clocks = clocks_right = 0
    count = examples(JOBS)
    for seed in range(count):
        one = told(random_job(kind, seed), tmp_path / str(seed))
        job, steps = one.job, one.job.steps
        world = len(job.programmes)
        alike = play(job, slow=False).step_ms
        network_ms = alike - play(job, slow=False, communication=1e-6).step_ms
        cost = 1 - alike / one.played.step_ms
        blamed = accused(one.said)
        assert blamed <= set(job.slow), f"job {seed}: {one.said.verdict}"
        names_it = blamed == set(job.slow) if cost > EVERYBODY_TELLS else True
        names_it &= not blamed if cost < NOBODY_TELLS else True
        told_network = any(one.cause == "communication" and one.stands_out for one in one.said.findings)
        names_network = told_network if network_ms > 0.15 * alike else True
        names_network &= not told_network if network_ms < 0.05 * alike else True
        right += names_it and names_network
        parts = one.said.breakdown.values()
        late_ms = sum(one.played.late_ms(rank, steps) for rank in range(world)) / world
        exposed_ms = sum(one.played.exposed_ms(rank, steps) for rank in range(world)) / world
        slack_ms = 0.01 * one.played.step_ms
        waits_right += sum(part.straggler_wait for part in parts) / world == pytest.approx(
            late_ms, 0.05, slack_ms
        ) and sum(part.exposed_communication for part in parts) / world == pytest.approx(
            exposed_ms, 0.05, slack_ms
        )
        for rank in blamed:
            (straggler,) = (each for each in one.said.stragglers if each.rank == rank)
            assert straggler.cause in ("forward", "backward")
        clocks += len(one.uncertain_us)
        clocks_right += sum(off <= may_be + 1e-3 for off, may_be in one.uncertain_us)
    assert right >= 0.95 * count
    assert waits_right >= 0.95 * count
    assert clocks_right >= 0.95 * clocks


@pytest.mark.parametrize("kind", ["ddp", "tp", "fsdp"])
def test_nobody_is_accused_for_a_rank_that_is_missing(kind: str, tmp_path: Path) -> None:
    for seed in range(examples(20)):
        job = random_job(kind, 1000 + seed)
        slow = random.Random(seed).randrange(len(job.programmes))
        one = told(replace(job, slow={slow: 1.4}, missing=(slow,)), tmp_path / str(seed))
        assert accused(one.said) == set(), one.said.verdict
        assert any("not in this trace" in note for note in one.said.notes)


def test_clocks_of_hosts_are_known_to_microseconds(tmp_path: Path) -> None:
    one = told(replace(random_job("ddp", 2), slow={1: 1.3}), tmp_path)
    assert len(set(one.job.hosts)) > 1
    assert max(may_be for _, may_be in one.uncertain_us) < 100
    assert accused(one.said) == {1}
