"""Hosts whose ranks are one worker together, as real processes, against one process that has a model for each host."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import workers
from tests.behaviour.decentralised import job

from headway.diagnosis import diagnose
from headway.trace.folder import load_trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

CASES = "tests.behaviour.decentralised.host_cases"
STEPS = 5


class HostReference(job.Reference):
    """A host of the reference: the mean gradient of its ranks. Statistics are those of its first rank's batches."""

    def __init__(self, host: int, ranks: Sequence[Sequence[int]], accumulation: int, **averages: Any) -> None:
        super().__init__(host, **averages)
        self._ranks, self._accumulation = ranks[host], accumulation

    def gradients(self) -> Sequence[torch.Tensor]:
        found = []
        begun_with = copy.deepcopy(self.module)
        for rank in self._ranks:
            module = self.module if rank == self._ranks[0] else copy.deepcopy(begun_with)
            for part in range(self._accumulation):
                own = job.loss(module, rank, self._accumulation * self.iteration + part)
                found.append(torch.autograd.grad(own, list(module.parameters())))
        return [sum(parts) / len(self._ranks) for parts in zip(*found, strict=True)]


def ranks_of(places: str) -> list[list[int]]:
    return [[rank for rank, each in enumerate(places) if each == place] for place in dict.fromkeys(places)]


@pytest.mark.parametrize(
    ("places", "options", "accumulation"),
    [
        pytest.param("aabb", {"groups": "static"}, 1, marks=pytest.mark.exhaustive),
        ("aabb", {"groups": "all"}, 2),
        pytest.param("abab", {"groups": "all", "moments": "averaged"}, 1, marks=pytest.mark.exhaustive),
        pytest.param(
            "abbb", {"groups": "all", "staleness": 1, "moments": "averaged"}, 1, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "aabc", {"groups": "static", "group_size": 2, "staleness": 1}, 1, marks=pytest.mark.exhaustive
        ),
        ("aabc", {"groups": "first-come", "group_size": 2, "deadline_ms": 50}, 1),
        pytest.param(
            "aaaa", {"groups": "pairs", "staleness": 1, "hosts": [2, 2]}, 2, marks=pytest.mark.exhaustive
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:30] if isinstance(value, dict) else str(value),
)
def test_each_host_trains_as_one_process_with_the_mean_gradient_of_its_ranks(
    places: str, options: dict[str, Any], accumulation: int
) -> None:
    results = workers.run(4, f"{CASES}:trains", places, options, STEPS, accumulation)
    hosts = ranks_of(places) if "hosts" not in options else [[0, 1], [2, 3]]
    firsts = [ranks[0] for ranks in hosts]
    rounds = [results[rank]["rounds"] for rank in firsts]
    expected = job.reference(
        len(hosts), rounds, STEPS, moments=options.get("moments", "local"), buffers="averaged",
        one=lambda host, **averages: HostReference(host, hosts, accumulation, **averages),
    )  # fmt: skip
    committed = [each["members"] for own in rounds for each in own if each["ending"] == "committed"]
    assert committed
    assert all(set(members) <= set(range(len(hosts))) for members in committed)
    parameters = sum(p.numel() for p in job.model().parameters())
    for ranks, found in zip(hosts, expected, strict=True):
        assert results[ranks[0]]["values"] == pytest.approx(found, rel=1e-9, abs=1e-12)
        for rank in ranks:
            assert results[rank]["held"] == results[ranks[0]]["held"], "the same bits after every step"
            assert results[rank]["values"][:parameters] == results[ranks[0]]["values"][:parameters]
            assert bool(results[rank]["rounds"]) == (rank == ranks[0])
    for result in results:
        assert result["ranks"] == [0, 1, 2, 3]
        assert result["final"] == results[0]["final"]
        assert result["is_ddp"]
        assert result["names"][0].startswith("module.0.")
    mean = torch.tensor([results[rank]["values"] for rank in firsts], dtype=torch.float64).mean(0)
    assert results[0]["final"] == pytest.approx(mean.tolist(), rel=1e-12, abs=1e-15)


def test_a_step_that_a_scaler_leaves_out_is_left_out_by_the_whole_host() -> None:
    results = workers.run(4, f"{CASES}:skips", "aabb")
    assert [each["steps"] for each in results] == [4, 4, 3, 3]
    assert results[2]["scales"] == results[3]["scales"] != results[0]["scales"]
    assert len({each["digest"] for each in results}) == 1


@pytest.mark.parametrize("victim", [3, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_host_that_loses_a_rank_ends_and_the_others_go_on(victim: int) -> None:
    ended = workers.launch(4, f"{CASES}:one_is_killed", "aabb", victim)
    assert ended[victim].status != 0
    left = ended[5 - victim].result
    assert left["steps"] == 3, ended[5 - victim].output
    assert "Error: " in left["said"]
    for worker in ended[:2]:
        assert worker.status == 0, worker.output
        assert worker.result["steps"] == 8
        assert worker.result["ranks"] == [0, 1]
        assert worker.result["digest"] == ended[0].result["digest"]
    assert ended[0].result["endings"].count("committed") >= 2


@pytest.mark.parametrize("groups", ["all", pytest.param("static", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_checkpoint_is_gone_on_from(staleness: int, groups: str) -> None:
    options = {"groups": groups, "staleness": staleness}
    for rank, result in enumerate(workers.run(4, f"{CASES}:restores", "aabb", options)):
        assert result["iteration"] == 3
        assert result["found"][0] == result["found"][1]
        assert "different checkpoints" in result["refused"], rank


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_rounds_of_hosts_are_recorded_and_diagnosed(tmp_path: Path, staleness: int) -> None:
    folder = tmp_path / "trace"
    told = workers.run(4, f"{CASES}:recorded", "abab", str(folder), staleness)
    trace = load_trace(folder)
    assert {rank: own.worker for rank, own in trace.rounds.items()} == {0: 0, 1: 1}
    assert told[2] == told[3] == []
    for info in trace.manifest.ranks:
        options = info.strategy["partial-all-reduce"]
        assert options["within_hosts"] == "all-reduce"
    averaging = diagnose(trace).averaging
    assert averaging is not None
    assert {each.members for each in averaging.groups} == {(0, 1)}, "hosts, by their first ranks"
    assert averaging.failed == 0
    assert "every host trains one model on all of its ranks" in averaging.changes_training


def test_ranks_of_one_host_train_under_ddp_with_a_warning() -> None:
    first, second = workers.run(2, f"{CASES}:all_on_one")
    assert len(first["said"]) == 1
    assert "DistributedDataParallel" in first["said"][0]
    assert second["said"] == []
    for result in (first, second):
        assert result["same"]
        assert result["ranks"] == [0, 1]


def test_what_would_train_wrongly_is_refused_on_every_rank() -> None:
    assert workers.run(2, f"{CASES}:refusals") == [{}, {}]
