"""Pipelines of torch in a recording: stages and micro-batches of passes and of messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from tests import workers
from tests.behaviour.pipeline_cases import MICRO_BATCHES, ROWS, STEPS, WIDTH

import headway
from headway.cli.main import cli
from headway.trace.events import Kind
from headway.trace.format import Trace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("pipeline")
    losses = workers.run(2, "tests.behaviour.pipeline_cases:recorded", str(folder))
    assert [len(each) for each in losses] == [0, STEPS * MICRO_BATCHES]
    return headway.load_trace(folder / "trace")


def labels(trace: Trace, rank: int, kind: str) -> list[tuple[int, int]]:
    rows = trace.events[rank].of_kind(kind).of_step(trace.steps[0])
    return list(zip(rows.stage.tolist(), rows.micro_batch.tolist(), strict=True))


def test_passes_have_their_stage_and_micro_batch(trace: Trace) -> None:
    for rank in (0, 1):
        for kind in (Kind.FORWARD_PASS, Kind.BACKWARD_PASS):
            assert labels(trace, rank, kind) == [(rank, number) for number in range(MICRO_BATCHES)]


def test_messages_have_the_stage_and_micro_batch_of_their_end(trace: Trace) -> None:
    for rank in (0, 1):
        for kind in (Kind.SEND, Kind.RECEIVE):
            assert labels(trace, rank, kind) == [(rank, number) for number in range(MICRO_BATCHES)]
            rows = trace.events[rank].of_kind(kind).of_step(trace.steps[0])
            assert set(rows.peer.tolist()) == {1 - rank}
            assert set(rows.size_bytes.tolist()) == {4 * ROWS * WIDTH}


def test_it_is_diagnosed_and_not_replayed(trace: Trace, tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["diagnose", str(trace.path)])
    assert said.exit_code == 0, said.output
    for command in (["replay"], ["optimize", "-o", str(tmp_path / "plan.yaml")]):
        said = CliRunner().invoke(cli, [*command, str(trace.path)])
        assert isinstance(said.exception, headway.UserError)
        assert "does not lay out pipelines" in str(said.exception)
        assert "\n" not in str(said.exception)
