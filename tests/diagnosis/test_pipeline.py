"""What the ranks of a pipeline wait for, on steps in which it is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models import layered_model

from headway.diagnosis.pipeline import pipeline_findings
from headway.scheduling.pipeline.orders import grouped, one_forward_one_backward
from headway.scheduling.pipeline.schedule import Action, Pass, PipelineSchedule, times_without_messages
from headway.trace.events import Event, Events, Kind, Stream
from headway.trace.format import Manifest, RankInfo, Trace

MS = 1_000_000
KINDS = {Pass.FORWARD: Kind.FORWARD_PASS, Pass.BACKWARD: Kind.BACKWARD_PASS}


def a_trace(schedule: PipelineSchedule, slow_stage: int = -1) -> Trace:
    """Forwards of 1 ms, backwards of 2 ms, twice as long in one stage; a message of 3 ms from rank 0 to rank 1."""

    def lasts(action: Action) -> int:
        return (1 if action.kind is Pass.FORWARD else 2) * (2 if action.stage == slow_stage else 1) * MS

    times = times_without_messages(schedule, lasts)
    rows: dict[int, list[Event]] = {rank: [] for rank in range(len(schedule.ranks))}
    for action in times.order:
        rows[schedule.rank_of_stage[action.stage]].append(
            Event(
                KINDS[action.kind], "", Stream.COMPUTE, 0, times.begins[action], lasts(action), stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )  # fmt: skip
    for rank, kind, peer in ((0, Kind.SEND, 1), (1, Kind.RECEIVE, 0)):
        rows[rank].append(
            Event(
                kind, kind, Stream.COMMUNICATION, 0, MS, 3 * MS, enqueue_ns=MS, sequence=0, size_bytes=9, peer=peer,
                stage=rank, micro_batch=0,
            )
        )  # fmt: skip
    ranks = tuple(
        RankInfo(rank=r, host=f"h{r}", world_size=len(rows), backend="gloo", version="") for r in rows
    )
    model = layered_model(1)
    return Trace(
        Path("trace"), Manifest(world_size=len(rows), steps=(0,), ranks=ranks), model,
        {rank: Events.from_rows(own) for rank, own in rows.items()}, stages=(model,) * len(rows),
    )  # fmt: skip


def test_what_a_step_would_take_without_messages_is_told_from_what_it_took() -> None:
    """1F1B of 4 micro-batches through 3 stages: (4 + 3 - 1) * 3 ms, of which ranks compute 12."""
    trace = a_trace(one_forward_one_backward(3, 4))
    found = {one.cause: one for one in pipeline_findings(trace, (0,), 30.0)}
    assert found["pipeline messages"].cost_ms == pytest.approx(12)
    assert "the slowest: 3 ms from rank 0 to rank 1" in found["pipeline messages"].sentence
    assert found["pipeline bubble"].cost_ms == pytest.approx(6)
    assert "4 micro-batches through 3 stages" in found["pipeline bubble"].sentence
    assert "uneven stages" not in found


def test_a_stage_that_takes_longer_is_named() -> None:
    """Twice the time in one of three stages: ranks wait for it, and would wait less if all took 4 ms."""
    trace = a_trace(grouped(3, 8, 2), slow_stage=1)
    found = {one.cause: one for one in pipeline_findings(trace, (0,), 60.0)}
    uneven = found["uneven stages"]
    assert uneven.ranks == (1,)
    assert uneven.stands_out
    assert "stage 1 (rank 1) takes 6 ms per micro-batch, the mean stage 4 ms" in uneven.sentence
    everything = sum(one.cost_ms for one in found.values())
    assert everything == pytest.approx(60 - 8 * 4, rel=0.01), "with what ranks compute it is the whole step"


def test_passes_that_make_no_schedule_are_left_to_the_usual_causes() -> None:
    whole = a_trace(one_forward_one_backward(2, 3))
    halves = Events.from_rows([row for row in whole.events[0] if row.kind != Kind.BACKWARD_PASS])
    trace = Trace(whole.path, whole.manifest, whole.model, {**whole.events, 0: halves}, stages=whole.stages)
    assert pipeline_findings(trace, (0,), 30.0) == []
