"""The answer of ``headway replay``: its table says the same as its first line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.answers.asked import JOB, written

from headway.cli.main import run
from headway.plan import Plan
from headway.replayer.replayer import Replayer
from headway.strategies.decoupled.policy import DecoupledStrategy
from headway.trace.folder import load_trace


def answered(trace: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert run(["replay", str(trace), *options]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("options", [(), ("--what-if", "bandwidth=0.5x")])
def test_the_parts_of_each_rank_add_up_to_the_step_of_the_first_line(
    options: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As for a recording whose replay is far off.
    monkeypatch.setattr(Replayer, "recorded_step_ms", property(lambda self: 0.5 * self.base.step_ms))
    lines = answered(written(JOB, tmp_path / "trace"), capsys, *options)
    answer = next(line for line in lines if "ms a step" in line)
    said_ms = float(answer.split()[0])
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    assert len(rows) == JOB.world_size
    for row in rows:
        assert sum(map(float, row[1:])) == pytest.approx(said_ms, abs=0.05 * len(row) + 0.02 * said_ms)


def test_fewer_workers_have_no_efficiency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(JOB, tmp_path / "trace")
    answer = answered(trace, capsys, "--what-if", "workers=1")[0]
    assert "with 1 worker: " in answer
    assert "times the samples a second of the recorded 4 workers" in answer
    assert "efficiency" not in answer
    document = json.loads("".join(answered(trace, capsys, "--what-if", "workers=1", "--json")))
    assert document["throughput_ratio"] > 0
    assert "efficiency" not in document


def test_the_links_of_a_recording_of_one_rank_are_said_to_be_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(replace(JOB, world_size=1), tmp_path / "trace")
    assert not any("assumed" in line for line in answered(trace, capsys))
    for workers in ("4", "2x2"):
        lines = answered(trace, capsys, "--what-if", f"workers={workers}")
        (note,) = (line for line in lines if "assumed between workers" in line)
        assert note.startswith(
            "Note: One rank was recorded, so no link was measured: 100 Gbit/s and a latency of "
        )
        assert "--cluster" in note


def test_what_the_library_of_a_given_cluster_ignores_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = written(JOB, tmp_path / "trace")
    replayed = Replayer(load_trace(trace))
    replayed.cluster.model_copy(update={"library": "nccl"}).save(tmp_path / "cluster.yaml")
    steps_ms = []
    for number, algorithm in enumerate(("ring", "direct")):
        strategy = DecoupledStrategy(reduce_scatter=algorithm)
        path = tmp_path / f"{number}.yaml"
        Plan.data_parallel(strategy, JOB.world_size, replayed.trace.model).save(path)
        given = ("--plan", str(path), "--cluster", str(tmp_path / "cluster.yaml"), "--json")
        document = json.loads("".join(answered(trace, capsys, *given)))
        steps_ms.append(document["step_ms"])
        assert any("NCCL chooses algorithms by itself" in each for each in document["notes"]) == bool(number)
    assert steps_ms[0] == steps_ms[1]
