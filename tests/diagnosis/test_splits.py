"""Advice about the modules of a pipeline's stages, on steps in which it is known."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnosis.test_pipeline import a_trace
from tests.strategies.pipeline.test_stage_links import a_stage

from headway.diagnosis.pipeline import pipeline_findings, split_advice
from headway.scheduling.pipeline.orders import one_forward_one_backward
from headway.scheduling.pipeline.schedule import Action, Pass
from headway.trace.events import Events
from headway.trace.format import Trace


def lasts(forward_ms: tuple[float, float]) -> dict[Action, float]:
    schedule = one_forward_one_backward(2, 8)
    return {
        action: forward_ms[action.stage] * (1 if action.kind is Pass.FORWARD else 2)
        for own in schedule.ranks
        for action in own
    }


def trace_of(first: str, second: str) -> Trace:
    trace = a_trace(one_forward_one_backward(2, 8))
    return of_large_messages(replace(trace, stages=(a_stage(first), a_stage(second))))


def of_large_messages(trace: Trace) -> Trace:
    """Messages that take 3 ms by their size are of a million bytes."""
    events = {
        rank: Events.from_rows([row._replace(size_bytes=10**6 if row.peer >= 0 else -1) for row in own])
        for rank, own in trace.events.items()
    }
    return replace(trace, events=events)


def test_modules_of_the_slowest_stage_are_named() -> None:
    """Five modules of 1 ms there and 2 back against one: 8 * 15 ms, and 9 * 9 where both have three."""
    schedule = one_forward_one_backward(2, 8)
    said = split_advice(trace_of("abcde", "f"), schedule, lasts((5, 1)), 150.0)
    assert said.startswith("moving d … e from stage 0 to stage 1 would make a step 26% faster")
    assert split_advice(trace_of("abc", "def"), schedule, lasts((3, 3)), 90.0) == ""
    assert split_advice(a_trace(schedule), schedule, lasts((5, 1)), 150.0) == "", (
        "nothing is known of modules"
    )


def test_the_finding_says_it() -> None:
    trace = a_trace(one_forward_one_backward(2, 8), slow_stage=0)
    known = of_large_messages(replace(trace, stages=(a_stage("abcd"), a_stage("ef"))))
    found = {one.cause: one.sentence for one in pipeline_findings(known, (0,), 60.0)}
    assert "; moving d from stage 0 to stage 1 would make a step" in found["uneven stages"]
    without = {one.cause: one.sentence for one in pipeline_findings(trace, (0,), 60.0)}
    assert without["uneven stages"].endswith("move layers to other stages.")
